"""Decides what the coordinator decides: who is a member, where models lie, which mode holds, when barriers open."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from ps_protocol.errors import Fenced, InvalidRequest, NotReady, UnknownModel
from ps_protocol.model import Consistency, ModelSpec, ShardMap
from ps_protocol.view import (
    BarrierState,
    ClusterStatus,
    ClusterView,
    Joined,
    Member,
    MemberStats,
    MemberStatus,
    Role,
    SyncWord,
)
from ps_server.coordinator.applicant import Applicant, Copies, check_applicant, check_state, check_vacant
from ps_server.coordinator.declaration import check_model, check_same
from ps_server.coordinator.memento import Key, Memento, Place
from ps_server.coordinator.placement import place
from ps_server.coordinator.settings import ClusterSettings, check_consistency, check_same_job

GONE_KEPT = 32
"""How many members that went are remembered, for status and for telling a returning one what happened."""

_LEFT = "left"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Decision(Generic[T]):
    """What an event led to; ``reason`` says in words what changed, and is empty when nothing did."""

    value: T
    reason: str = ""


@dataclass(slots=True)
class _Life:
    place: Place
    last_heartbeat: float
    stats: MemberStats

    @property
    def member(self) -> Member:
        return self.place.joined.member

    @property
    def lease_end(self) -> float:
        """By the lease the member was told, which an earlier start of the coordinator may have chosen."""
        return self.last_heartbeat + self.place.joined.lease_seconds

    def status(self, now: float, gone: str = "") -> MemberStatus:
        who = self.place.applicant
        # Never below 0: a lease may have been extended.
        heard = max(0.0, now - self.last_heartbeat)
        return MemberStatus(self.member, heard, self.stats, who.host, who.pid, gone)


class ClusterState:
    """The cluster as one state machine. Called by the driver, from one loop; does no I/O and reads no clock.

    Times are seconds of any steady clock. An event that raises has changed nothing. ``view.revision`` rises with every
    change of the view; ``phase`` rises when a barrier opens. Neither ever falls, nor do incarnations, also over
    ``memento`` and ``restore``.
    """

    def __init__(self, settings: ClusterSettings) -> None:
        """Raises InvalidRequest when the settings' consistency mode cannot work."""
        check_consistency(settings.consistency, settings.expected_workers)
        self._settings = settings
        self._lives: dict[Key, _Life] = {}
        self._by_token: dict[str, _Life] = {}
        self._gone: deque[MemberStatus] = deque(maxlen=GONE_KEPT)
        self._next_incarnation = settings.first_incarnation
        self._maps: dict[str, ShardMap] = {}
        #: Places that were held before the start; the start is when they are all that are expected.
        self._seen: set[Key] = set()
        #: Per shard number, the incarnation that wrote the newest state known to be on a disk.
        self._newest_state: dict[int, int] = {}
        #: Per shard number, the directories that hold that state.
        self._copies: dict[int, Copies] = {}
        self.phase = 0
        #: Ranks that wait at the barrier of this phase.
        self._arrived: set[int] = set()
        self.view = ClusterView(
            consistency=settings.consistency,
            expected_shards=settings.expected_shards,
            expected_workers=settings.expected_workers,
        )

    # Beyond the process

    @classmethod
    def restore(cls, settings: ClusterSettings, memento: Memento, now: float) -> ClusterState:
        """The cluster as it was; each member has a whole lease from ``now``, and barriers wait for all again.

        The mode is the memento's. A finished job begins a new run: models and phase stay, and all that are expected
        are waited for again. Raises ConfigError when ``settings`` are of another job.
        """
        check_same_job(settings, memento.identity)
        state = cls(replace(settings, consistency=memento.consistency))
        state._next_incarnation = max(memento.next_incarnation, settings.first_incarnation)
        state.phase = memento.phase
        for key, kept in memento.places.items():
            life = _Life(kept, now, MemberStats())
            state._lives[key] = state._by_token[kept.applicant.token] = life
        state._gone.extend(memento.gone)
        state._maps.update(memento.maps)
        state._newest_state.update(memento.newest_state)
        state._copies.update(memento.copies)
        state._seen.update(memento.seen)
        state.view = replace(
            state.view,
            revision=memento.revision,
            members=state._members(),
            models=state._epochs(),
            started=memento.started,
            finished=memento.finished,
        )
        if memento.finished:
            state._seen = {key for key in state._lives if key[0] is Role.SHARD}
            state._change(started=False, finished=False)
        return state

    def memento(self) -> Memento:
        """All that ``restore`` needs, but for the leases on data, which are not kept here."""
        return Memento(
            identity=self._settings.identity,
            next_incarnation=self._next_incarnation,
            revision=self.view.revision,
            phase=self.phase,
            started=self.view.started,
            finished=self.view.finished,
            consistency=self.view.consistency,
            seen=frozenset(self._seen),
            newest_state=dict(self._newest_state),
            copies=dict(self._copies),
            places={key: life.place for key, life in self._lives.items()},
            maps=dict(self._maps),
            gone=tuple(self._gone),
        )

    # Membership

    def join(self, ask: Applicant, now: float) -> Decision[Joined]:
        """Give ``ask`` a place and a new incarnation; a repetition gets the first answer again.

        Whoever held the place is fenced: a process that was started again does not wait for its own old lease.
        Raises ProtocolVersionMismatch, InvalidRequest, UnknownShard for a shard number out of range, Fenced for a shard
        that brings older state than is known of its place, or NotReady for one that yields and a standby too many.
        """
        check_applicant(ask, self._settings.expected_shards)
        if known := self._by_token.get(ask.token):
            known.last_heartbeat = now
            return Decision(known.place.joined)
        index = self._lowest_free(ask.role) if ask.index is None else ask.index
        old = self._lives.get((ask.role, index))
        check_vacant(ask, old.place.applicant if old else None)
        if ask.role is Role.SHARD:
            self._take_over_state(ask, index)
        # Above what the shard brings, too: a coordinator that lost its journal may count from too low.
        incarnation = max(self._next_incarnation, ask.data_incarnation + 1)
        self._next_incarnation = incarnation + 1
        member = Member(ask.role, index, incarnation, ask.address)
        reason = f"{member} joined as incarnation {member.incarnation}"
        if old:
            self._forget(old, f"incarnation {member.incarnation} took its place", now)
            reason += f"; incarnation {old.member.incarnation} is fenced"
        joined = Joined(
            member,
            self._settings.lease_seconds,
            self._settings.heartbeat_seconds,
            self.view.revision + 1,
            self._settings.seed,
            self.phase,
        )
        life = _Life(Place(ask, joined), now, MemberStats())
        self._lives[ask.role, index] = self._by_token[ask.token] = life
        starts = self._starts_with(member)
        if starts:
            reason += "; all expected members are there: the job starts"
        finished = self.view.finished and ask.role is not Role.WORKER
        self._change(started=self.view.started or starts, finished=finished)
        return Decision(joined, "; ".join([reason, *self._open_barrier()]))

    def heartbeat(
        self,
        role: Role,
        index: int,
        incarnation: int,
        stats: MemberStats,
        now: float,
        *,
        keeps_state: bool = False,
        sync: SyncWord | None = None,
    ) -> Decision[None]:
        """Renew a lease. Raises Fenced when the place is not this incarnation's.

        With ``keeps_state`` a shard says that its state is on disk under this incarnation: from now on nobody takes
        the place with older state. ``sync``: which directory has a copy of all of it that was acknowledged. Neither
        means anything from other roles.
        """
        life = self._life(role, index, incarnation)
        life.last_heartbeat, life.stats = now, stats
        if not keeps_state or role is not Role.SHARD:
            return Decision(None)
        reasons = []
        if self._newest_state.get(index) != incarnation:
            self._newest_state[index] = incarnation
            self._copies[index] = Copies(life.place.applicant.directory)
            reasons.append(f"{life.member} keeps its state as incarnation {incarnation}")
        copies = self._copies.get(index, Copies())
        if sync and sync.number > copies.word:
            self._copies[index] = replace(copies, word=sync.number, standby=sync.directory)
            said = "has everything it acknowledges" if sync.directory else "does not have all it acknowledges"
            reasons.append(f"{life.member} says that its standby {said}")
        return Decision(None, "; ".join(reasons))

    def leave(self, role: Role, index: int, incarnation: int, why: str, now: float) -> Decision[None]:
        """End a membership; ``why`` is empty at a clean end. When the last worker ends cleanly, the job is finished.

        A repetition changes nothing. Raises Fenced when the place was lost before.
        """
        if self._fate(role, index, incarnation).startswith(_LEFT):
            return Decision(None)
        life = self._life(role, index, incarnation)
        how = f"{_LEFT}: {why}" if why else _LEFT
        self._forget(life, how, now)
        reasons = [f"{life.member} {how}"]
        last = role is Role.WORKER and not self._ranks()
        if last and not why and self.view.started:
            reasons.append("every worker has left: the job is finished")
            self._change(finished=True)
        else:
            self._change()
        return Decision(None, "; ".join([*reasons, *self._open_barrier()]))

    def expire(self, now: float) -> Decision[tuple[Member, ...]]:
        """Remove the members whose leases have ended by ``now``."""
        ended = [life for life in self._lives.values() if now >= life.lease_end]
        if not ended:
            return Decision(())
        for life in ended:
            self._forget(life, f"its lease of {life.place.joined.lease_seconds:g} s ended", now)
        self._change()
        members = tuple(life.member for life in ended)
        names = ", ".join(str(member) for member in members)
        return Decision(members, "; ".join([f"no heartbeat, lease ended: {names}", *self._open_barrier()]))

    def next_expiry(self) -> float | None:
        """When the first lease ends if no heartbeat comes; None without members."""
        return min((life.lease_end for life in self._lives.values()), default=None)

    def extend_leases(self, seconds: float) -> None:
        """Give every member ``seconds`` more: for a time in which nobody could have been heard."""
        for life in self._lives.values():
            life.last_heartbeat += seconds

    # Models and mode

    def declare(
        self,
        rank: int,
        incarnation: int,
        spec: ModelSpec,
        as_saved: Callable[[ShardMap], ShardMap] | None = None,
    ) -> Decision[ShardMap]:
        """Place a model that is new, or check that it is the one placed under its name.

        ``as_saved``: how a new one is placed whose values come from a checkpoint.

        Raises NotReady while shards are missing, ModelMismatch with every difference, InvalidRequest or Fenced.
        """
        member = self._life(Role.WORKER, rank, incarnation).member
        if known := self._maps.get(spec.name):
            check_same(known.spec, spec, str(member))
            return Decision(known)
        check_model(spec)
        shards = self._settings.expected_shards
        if missing := [number for number in range(shards) if (Role.SHARD, number) not in self._lives]:
            raise NotReady(
                f"model '{spec.name}' cannot be placed yet: {len(missing)} of {shards} shards are missing",
                shard=", ".join(map(str, missing)),
                remedy="start the missing shards; the worker tries again",
            )
        shard_map = ShardMap(1, spec, shards, place(spec, shards, self._settings.partition))
        shard_map = self._maps[spec.name] = as_saved(shard_map) if as_saved else shard_map
        self._change(models=self._epochs())
        nbytes = sum(v.nbytes for v in spec.variables)
        return Decision(shard_map, f"{member} declared model '{spec.name}': {nbytes} bytes on {shards} shards")

    def shard_map(self, model: str) -> ShardMap:
        """Where ``model`` lives. Raises UnknownModel."""
        if model not in self._maps:
            known = ", ".join(f"'{name}'" for name in self._maps) or "none yet"
            raise UnknownModel(f"no model '{model}' has been declared", expected=known)
        return self._maps[model]

    def set_consistency(self, consistency: Consistency) -> Decision[ClusterView]:
        """Change the mode of the job. Raises InvalidRequest when it cannot work."""
        check_consistency(consistency, self._settings.expected_workers)
        before = self.view.consistency
        if consistency == before:
            return Decision(self.view)
        self._change(consistency=consistency)
        return Decision(self.view, f"consistency changed from {before} to {consistency}")

    # Barriers

    def arrive(self, rank: int, incarnation: int, phase: int) -> Decision[BarrierState]:
        """A worker reaches the barrier that ends ``phase``, for the first time or again.

        It opens when every live worker is there, and all expected ones have been there once. Raises Fenced, or
        InvalidRequest for a phase that has not begun.
        """
        member = self._life(Role.WORKER, rank, incarnation).member
        if phase > self.phase:
            raise InvalidRequest(
                f"{member} is at the barrier of a phase that has not begun",
                expected=f"phase {self.phase}",
                actual=f"phase {phase}",
            )
        if phase < self.phase:
            return Decision(BarrierState(released=True))
        self._arrived.add(rank)
        reason = "; ".join(self._open_barrier())
        return Decision(BarrierState(phase < self.phase, () if phase < self.phase else self._missing()), reason)

    def status(self, now: float) -> ClusterStatus:
        """The view, the live members with their statistics, and the last that went."""
        live = (life.status(now) for life in self._lives.values())
        return ClusterStatus(self.view, (*live, *self._gone))

    # Inner workings

    def _take_over_state(self, ask: Applicant, index: int) -> None:
        """Raises Fenced or NotReady when ``ask`` must not go on with what it brings."""
        newest = self._newest_state.get(index, 0)
        check_state(ask, newest, self._copies.get(index, Copies()))
        if ask.data_incarnation and ask.data_incarnation != newest:
            self._newest_state[index] = ask.data_incarnation
            self._copies[index] = Copies(ask.directory)

    def _lowest_free(self, role: Role) -> int:
        index = 0
        while (role, index) in self._lives:
            index += 1
        return index

    def _ranks(self) -> set[int]:
        return {index for role, index in self._lives if role is Role.WORKER}

    def _starts_with(self, member: Member) -> bool:
        if self.view.started:
            return False
        self._seen.add((member.role, member.index))
        roles = [role for role, _ in self._seen]
        starts = (
            roles.count(Role.SHARD) >= self._settings.expected_shards
            and roles.count(Role.WORKER) >= self._settings.expected_workers
        )
        if starts:
            self._seen.clear()
        return starts

    def _life(self, role: Role, index: int, incarnation: int) -> _Life:
        life = self._lives.get((role, index))
        if life is not None and life.member.incarnation == incarnation:
            return life
        fate = self._fate(role, index, incarnation) or "this coordinator does not know it; was it started anew?"
        holder = f"incarnation {life.member.incarnation}" if life else "nobody"
        raise Fenced(
            f"{role.value} {index} is not a member any more: {fate}",
            expected=f"the place is held by {holder}",
            actual=f"incarnation {incarnation}",
            remedy="start this process again; it joins as a new incarnation",
        )

    def _fate(self, role: Role, index: int, incarnation: int) -> str:
        """How this incarnation went; empty when it lives or is not remembered."""
        for status in self._gone:
            m = status.member
            if (m.role, m.index, m.incarnation) == (role, index, incarnation):
                return status.gone
        return ""

    def _forget(self, life: _Life, how: str, now: float) -> None:
        member = life.member
        del self._lives[member.role, member.index], self._by_token[life.place.applicant.token]
        self._gone.append(life.status(now, how))
        if member.role is Role.WORKER:
            self._arrived.discard(member.index)

    def _missing(self) -> tuple[int, ...]:
        expected = set() if self.view.started else set(range(self._settings.expected_workers))
        return tuple(sorted((self._ranks() | expected) - self._arrived))

    def _open_barrier(self) -> Iterator[str]:
        """Open the barrier if nobody is missing; yields the reason."""
        if not self._arrived or not self.view.started or self._missing():
            return
        yield f"barrier of phase {self.phase} opens for {len(self._arrived)} workers"
        self.phase += 1
        self._arrived.clear()

    def _change(self, **changes: Any) -> None:
        """One new revision of the view with the present members and ``changes``."""
        self.view = replace(self.view, revision=self.view.revision + 1, members=self._members(), **changes)

    def _members(self) -> tuple[Member, ...]:
        return tuple(self._lives[key].member for key in sorted(self._lives, key=lambda k: (k[0].value, k[1])))

    def _epochs(self) -> dict[str, int]:
        return {name: shard_map.epoch for name, shard_map in self._maps.items()}
