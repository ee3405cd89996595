"""Decides who is a member, when the job starts and ends, and when barriers open."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from ps_protocol import times
from ps_protocol.cluster.scaling import ENDED
from ps_protocol.cluster.view import (
    BarrierState,
    Joined,
    JoinRequest,
    Member,
    MemberStats,
    MemberStatus,
    Role,
    StandbyReport,
)
from ps_protocol.cluster.weights import NOBODY, ShardHome
from ps_protocol.errors import DamagedData, InvalidRequest
from ps_server.coordinator.changes import CurrentView, StateChange
from ps_server.coordinator.membership.admission import (
    StateCopies,
    check_applicant,
    check_free_rank,
    check_repetition,
    check_state,
    check_vacant,
)
from ps_server.coordinator.membership.members import Key, MemberRecord, Members, SavedMember
from ps_server.coordinator.membership.scaling import Scaling
from ps_server.coordinator.settings import ClusterSettings


class StartQuorum:
    """Part of MembershipState. Before the start it records the members that have joined; afterwards, the workers that
    are done.
    """

    def __init__(self, expected_workers: int, seen: Iterable[Key] = (), least_workers: int = 0) -> None:
        """``expected_workers``: 0 if workers join and leave at any time; the start then waits for ``least_workers``."""
        self._expected_workers = expected_workers
        self._awaited = expected_workers or least_workers
        self._seen = set(seen)

    @property
    def seen(self) -> frozenset[Key]:
        """Before the start, the places of members that joined; after it, those of workers that ended cleanly."""
        return frozenset(self._seen)

    def comes(self, place: Key, *, started: bool) -> None:
        """Note that a member takes ``place``."""
        if started:
            self._seen.discard(place)
        else:
            self._seen.add(place)

    def is_done(self, rank: int) -> None:
        """Note that a worker ended cleanly: later starts do not wait for it."""
        if rank < self._expected_workers:
            self._seen.add((Role.WORKER, rank))

    def complete(self, shards: Iterable[int], live: Collection[Key]) -> bool:
        """Whether a job that has not started starts now: these ``shards`` and all expected workers have joined.

        When a job starts again after all workers were lost, those that had ended cleanly count as joined.
        """
        workers = sum(role is Role.WORKER for role, _ in self._seen)
        if workers < self._awaited or not self._seen.issuperset((Role.SHARD, number) for number in shards):
            return False
        self._seen = {key for key in self._seen if key[0] is Role.WORKER and key not in live}
        return True

    def begin_again(self, shards: int) -> bool:
        """Called when the last live worker is lost. Returns whether the job waits for a new start.

        A new start waits for all workers that have not finished, but not for shards.
        """
        if self._expected_workers:
            self._seen |= {(Role.SHARD, number) for number in range(shards)}
        return self._expected_workers > 0

    @property
    def missing(self) -> set[int]:
        """The expected ranks that have not joined before the start."""
        return {rank for rank in range(self._awaited) if (Role.WORKER, rank) not in self._seen}


class DurabilityLedger:
    """Part of MembershipState: the persisted state that shards have reported, by shard number."""

    def __init__(
        self, newest: Mapping[int, int] | None = None, copies: Mapping[int, StateCopies] | None = None
    ) -> None:
        self._newest = dict(newest or {})
        self._copies = dict(copies or {})

    @property
    def newest(self) -> dict[int, int]:
        """The incarnation that wrote the newest state known to be on a disk."""
        return dict(self._newest)

    @property
    def copies(self) -> dict[int, StateCopies]:
        """The directories with that state."""
        return dict(self._copies)

    def check(self, ask: JoinRequest, index: int) -> None:
        """Raises Fenced or NotReady if ``ask`` must not serve shard ``index`` with its state."""
        check_state(ask, self._newest.get(index, 0), self._copies.get(index, StateCopies()))

    def take_over(self, ask: JoinRequest, index: int) -> None:
        """Make ``ask`` serve shard ``index``. Raises the errors of ``check``."""
        self.check(ask, index)
        newest = self._newest.get(index, 0)
        if ask.data_incarnation and ask.data_incarnation != newest:
            self._newest[index] = ask.data_incarnation
            self._copies[index] = StateCopies(ask.directory)

    def note(self, shard: Member, directory: str, sync: StandbyReport | None) -> Iterator[str]:
        """Record a report of ``shard``: its state in ``directory``, its standby in ``sync``. Yields what has
        changed.
        """
        index, incarnation = shard.index, shard.incarnation
        if self._newest.get(index) != incarnation:
            self._newest[index] = incarnation
            self._copies[index] = StateCopies(directory)
            yield f"{shard} keeps its state as incarnation {incarnation}"
        copies = self._copies.get(index, StateCopies())
        if sync and sync.number > copies.word:
            self._copies[index] = replace(copies, word=sync.number, standby=sync.directory)
            said = "has everything it acknowledges" if sync.directory else "does not have all it acknowledges"
            yield f"{shard} reports that its standby {said}"


class Barrier:
    """Part of MembershipState. One barrier ends each phase; ``phase`` rises when it opens, and never falls."""

    def __init__(self, phase: int = 0) -> None:
        self.phase = phase
        #: Ranks at the barrier of this phase.
        self._arrived: set[int] = set()

    def arrive(self, member: Member, phase: int) -> bool:
        """Record a worker at the barrier that ends ``phase``; returns whether the barrier is open already.

        Raises InvalidRequest for a phase that has not begun.
        """
        if phase > self.phase:
            raise InvalidRequest(
                f"{member} is at the barrier of a phase that has not begun",
                expected=f"phase {self.phase}",
                actual=f"phase {phase}",
            )
        if phase == self.phase:
            self._arrived.add(member.index)
        return phase < self.phase

    def forget(self, rank: int) -> None:
        """Remove a worker that has left or was lost."""
        self._arrived.discard(rank)

    def state(self, phase: int, awaited: Set[int]) -> BarrierState:
        """Whether the barrier that ends ``phase`` is open; if not, which ``awaited`` ranks are missing."""
        released = phase < self.phase
        return BarrierState(released, () if released else self._missing(awaited))

    def open(self, awaited: Set[int]) -> Iterator[str]:
        """Open the barrier if a worker has arrived and no ``awaited`` one is missing; yields the reason."""
        if not self._arrived or self._missing(awaited):
            return
        yield f"barrier of phase {self.phase} opens for {len(self._arrived)} workers"
        self.phase += 1
        self._arrived.clear()

    def _missing(self, awaited: Set[int]) -> tuple[int, ...]:
        return tuple(sorted(awaited - self._arrived))


BEATS_PER_SECOND = 300.0
"""Of all members together, where their leases allow it: about a fifth of a core."""


def next_heartbeat_seconds(members: int, heartbeat_seconds: float, lease_seconds: float) -> float:
    """Seconds between two heartbeats of one of ``members``: at least the configured ``heartbeat_seconds``."""
    return max(heartbeat_seconds, min(members / BEATS_PER_SECOND, lease_seconds / times.BEATS_PER_LEASE))


STARTS = "all expected members have joined: the job starts"

LATE = 0.25
"""Part of its lease after which a silent member counts as late."""

_LEFT = "left"
_ENDED = f"{_LEFT}: {ENDED}"
#: The reason of a worker that was asked to end, by Ctrl-C or SIGTERM, begins with one of these.
_INTERRUPTED = ("KeyboardInterrupt", "Terminated")


@dataclass(frozen=True, slots=True)
class MembershipRecords:
    """The persisted part of MembershipState."""

    #: The next incarnation; no process has it or a higher one.
    next_incarnation: int
    phase: int
    #: Places that a start of the job does not wait for.
    seen: frozenset[Key]
    #: Per shard number, the incarnation that wrote the newest state known to be on a disk.
    newest_state: Mapping[int, int]
    #: Per shard number, the directories that hold that newest state.
    copies: Mapping[int, StateCopies] = field(default_factory=dict)
    places: Mapping[Key, SavedMember] = field(default_factory=dict)
    #: The last former members.
    gone: tuple[MemberStatus, ...] = ()


class MembershipState:
    """Part of ClusterState: members, leases, the start quorum, the barrier. An event that raises changes nothing.

    ``phase`` rises when a barrier opens. Neither it nor incarnations ever fall, also over ``restore``.
    """

    def __init__(
        self, settings: ClusterSettings, view: CurrentView, phase: int = 0, scaling: Scaling | None = None
    ) -> None:
        self._settings = settings
        self._scaling = scaling or Scaling()
        self._view = view
        self._members = Members(settings.clock_began)
        self._next_incarnation = settings.first_incarnation
        self._journalled = False
        #: The incarnations between the journal's last and this process's first; no member has one of them.
        self._unused_incarnations = range(0)
        self._quorum = StartQuorum(settings.expected_workers, least_workers=settings.least_workers)
        self._ledger = DurabilityLedger()
        self._barrier = Barrier(phase)
        #: Whether members with ended leases were kept at the last check, because most members were late.
        self.spares = False

    def restore(self, records: MembershipRecords, now: float, *, finished: bool) -> None:
        """Restore the members of ``records``; each gets a whole lease from ``now``, and barriers await all again.

        ``finished``: whether the job had ended. Then a new run begins, which waits for all expected workers and for
        shards that are not members.
        """
        self._next_incarnation = max(records.next_incarnation, self._settings.first_incarnation)
        self._journalled = True
        self._unused_incarnations = range(records.next_incarnation, self._next_incarnation)
        for saved in records.places.values():
            self._members.begin(saved, now)
        self._members.remember(records.gone)
        self._ledger = DurabilityLedger(records.newest_state, records.copies)
        seen = {key for key in self._members if key[0] is Role.SHARD} if finished else records.seen
        self._quorum = StartQuorum(self._settings.expected_workers, seen, self._settings.least_workers)

    def persisted_state(self) -> MembershipRecords:
        """The state for ``restore``."""
        return MembershipRecords(
            next_incarnation=self._next_incarnation,
            phase=self.phase,
            seen=self._quorum.seen,
            newest_state=self._ledger.newest,
            copies=self._ledger.copies,
            places=self._members.places,
            gone=self._members.gone,
        )

    @property
    def members(self) -> tuple[Member, ...]:
        """The live members, by role and number."""
        return self._members.members

    @property
    def phase(self) -> int:
        """Barriers passed."""
        return self._barrier.phase

    @property
    def expected(self) -> frozenset[int]:
        """Ranks that the start of the job waits for; empty once it has started."""
        return frozenset() if self._view.now.started else frozenset(self._quorum.missing)

    @property
    def shard_tokens(self) -> Mapping[int, str]:
        """The token that each live shard joined with, by its incarnation."""
        places = self._members.places.values()
        shards = (place for place in places if place.joined.member.role is Role.SHARD)
        return {place.joined.member.incarnation: place.application.token for place in shards}

    @property
    def shard_homes(self) -> Mapping[int, ShardHome]:
        """Who serves each shard that is a member now, by number; nobody for one whose slices have left it."""
        places = self._members.places.values()
        return dict.fromkeys(self._view.now.spare, NOBODY) | {
            place.joined.member.index: ShardHome(
                place.joined.member.incarnation, place.application.directory, place.joined.member.address
            )
            for place in places
            if place.joined.member.role is Role.SHARD
        }

    @property
    def fenced_calls(self) -> int:
        """The number of calls from processes that are no longer members."""
        return self._members.fenced_calls

    def find(self, role: Role, index: int, incarnation: int) -> Member:
        """The live member of this place and incarnation. Raises Fenced when the place is not this incarnation's."""
        return self._members.find(role, index, incarnation).member

    def heartbeats(self, role: Role) -> Mapping[tuple[int, int], int]:
        """The number of heartbeats from each member of ``role``, by number and incarnation."""
        return self._members.beats(role)

    def is_silent(self, ask: JoinRequest, begin: Mapping[tuple[int, int], int]) -> bool:
        """Whether the member in the place, or any member of the role, has sent nothing since ``begin``."""
        holders = {key: beats for key, beats in self.heartbeats(ask.role).items() if ask.index in (None, key[0])}
        return any(begin.get(key) == beats for key, beats in holders.items())

    def statuses(self, now: float) -> tuple[MemberStatus, ...]:
        """The live members with their statistics, then the last ones that left or were lost."""
        return self._members.statuses(now)

    def join(self, ask: JoinRequest, now: float) -> StateChange[Joined]:
        """Give ``ask`` a place and a new incarnation; a repetition gets the first answer again.

        The previous member in the place is fenced only if the new process proves that it is dead, or has the order to
        take over: see ``check_vacant``. With ``add`` a shard enlarges the job; its number, and new ones below it, are
        spare. Raises ProtocolVersionMismatch, InvalidRequest, UnknownShard for a shard number out of range, Fenced for
        a shard with older state than its place had, NotReady for one that yields and for a second standby, PlaceTaken
        if another process has the place, or every rank is taken, DamagedData for a shard's state that a whole journal
        would contain.
        """
        workers = self._settings.expected_workers or self._settings.most_workers
        check_applicant(ask, self._view.now.expected_shards, workers)
        if known := self._members.by_token(ask.token):
            check_repetition(ask, known.member)
            self._members.renew(known, now)
            return StateChange(known.place.joined)
        if ask.index is None and ask.role is Role.WORKER:
            check_free_rank(workers, self._members.ranks)
        index = self._members.lowest_free(ask.role) if ask.index is None else ask.index
        old = self._members.holder(ask.role, index)
        if ask.role is Role.SHARD and not ask.yields:
            self._check_journalled(ask)
            self._ledger.check(ask, index)
        check_vacant(ask, old.place.application if old else None, old.held(now) if old else "")
        if ask.role is Role.SHARD:
            self._ledger.take_over(ask, index)
        # Also above the incarnation of the shard's state: a coordinator that lost its journal may count from too low.
        incarnation = max(self._next_incarnation, ask.data_incarnation + 1)
        self._next_incarnation = incarnation + 1
        member = Member(ask.role, index, incarnation, ask.address)
        reason = f"{member} joined as incarnation {member.incarnation}"
        if old:
            self._end(old, f"incarnation {member.incarnation} took its place", now)
            reason += f"; incarnation {old.member.incarnation} is fenced"
        joined = Joined(
            member,
            self._settings.lease_seconds,
            self._settings.heartbeat_seconds,
            self._view.now.revision + 1,
            self._settings.seed,
            self.phase,
        )
        self._members.begin(SavedMember(ask, joined), now)
        if member.role is Role.WORKER:
            self._scaling.joined(member.index)
        view, changes = self._view.now, {}
        if ask.adds(view.expected_shards):
            added = set(range(view.expected_shards, index + 1))
            changes = {"expected_shards": index + 1, "spare": view.spare | added}
            reason += "; it is new in this job, and spare"
        self._quorum.comes((member.role, member.index), started=view.started)
        if starts := self.starts(view.used_shards):
            reason += f"; {STARTS}"
        finished = view.finished and ask.role is not Role.WORKER
        self._change(started=view.started or starts, finished=finished, released=finished and view.released, **changes)
        return StateChange(joined, "; ".join([reason, *self._open_barrier()]))

    def heartbeat(
        self,
        role: Role,
        index: int,
        incarnation: int,
        stats: MemberStats,
        now: float,
        *,
        keeps_state: bool = False,
        sync: StandbyReport | None = None,
    ) -> StateChange[None]:
        """Renew a lease. Raises Fenced when the place is not this incarnation's.

        With ``keeps_state`` a shard reports that its state is on disk under this incarnation: from now on no process
        with older state can replace it. ``sync``: the directory with a copy of every acknowledged push. Both are
        ignored from other roles.
        """
        record = self._members.find(role, index, incarnation)
        self._members.renew(record, now)
        record.stats = stats
        if not keeps_state or role is not Role.SHARD:
            return StateChange(None)
        return StateChange(None, "; ".join(self._ledger.note(record.member, record.place.application.directory, sync)))

    def leave(self, role: Role, index: int, incarnation: int, why: str, now: float) -> StateChange[None]:
        """End a membership; ``why`` is empty at a clean end. When the last worker ends cleanly, the job is finished.

        Later starts do not wait for a worker that ended cleanly. If the last worker ends otherwise, the job waits for
        all others. A repetition changes nothing. Raises Fenced if the membership was lost before.
        """
        if self._members.fate(role, index, incarnation).startswith(_LEFT):
            return StateChange(None)
        record = self._members.find(role, index, incarnation)
        how = self._end(record, f"{_LEFT}: {why}" if why else _LEFT, now)
        reasons = [f"{record.member} {how}"]
        if role is Role.WORKER and not why:
            self._quorum.is_done(index)
        last = role is Role.WORKER and not self._members.ranks
        if last and not why and self._view.now.started:
            reasons.append("every worker has left: the job is finished")
            self._scaling.finish()
            self._change(finished=True)
        elif last and why:
            reasons += self._lost_all()
        else:
            self._change()
        failed = role is Role.WORKER and bool(why) and not why.startswith(_INTERRUPTED) and how != _ENDED
        return StateChange(None, "; ".join([*reasons, *self._open_barrier()]), loss=failed)

    @property
    def lost_servers(self) -> tuple[MemberStatus, ...]:
        """The last lost shard or standby of each place, unless it has returned."""
        return self._members.lost_servers

    @property
    def heartbeat_seconds(self) -> float:
        """The time between two heartbeats of a member."""
        settings = self._settings
        return next_heartbeat_seconds(len(self._members), settings.heartbeat_seconds, settings.lease_seconds)

    def connected(self, role: Role, index: int, incarnation: int) -> None:
        """Note a new watch stream; its process need not be a member any more."""
        self._members.connected(role, index, incarnation)

    def disconnected(self, role: Role, index: int, incarnation: int, now: float) -> None:
        """Note the end of a watch stream; its process need not be a member any more."""
        self._members.disconnected(role, index, incarnation, now)

    def expire(self, now: float) -> StateChange[tuple[Member, ...]]:
        """Remove the members whose leases have ended by ``now``. If no worker is left, the job waits for all again.

        While half of at least MANY members are late, the coordinator or the network is: leases last up to twice as
        long. A member counts as late after a quarter of its lease, and half a heartbeat too late.
        """
        ended, seconds = self._members.ended(now), self.heartbeat_seconds
        late_seconds = max(1.5 * seconds, LATE * self._settings.lease_seconds)
        self.spares = bool(ended) and self._members.mostly_late(now, late_seconds)
        if self.spares:
            ended = self._members.spare(ended, seconds)
        if not ended:
            return StateChange(())
        for record in ended:
            if record.member.role is Role.WORKER:
                self._end(record, record.how_expired, now)
            else:
                self._members.expire(record, now)
        members = tuple(record.member for record in ended)
        reasons = ["no heartbeat, lease ended: " + ", ".join(map(str, members))]
        if not self._members.ranks and any(member.role is Role.WORKER for member in members):
            reasons += self._lost_all()
        else:
            self._change()
        return StateChange(members, "; ".join([*reasons, *self._open_barrier()]), loss=True)

    def next_expiry(self) -> float | None:
        """When the first lease ends if no heartbeat arrives; None without members."""
        return self._members.next_expiry()

    def extend_leases(self, seconds: float) -> None:
        """Extend every lease by ``seconds``, a time in which no heartbeat could arrive."""
        self._members.extend(seconds)

    def arrive(self, rank: int, incarnation: int, phase: int) -> StateChange[BarrierState]:
        """Record that a worker reaches the barrier that ends ``phase``, for the first time or again.

        The barrier opens when every live worker has arrived, and all expected ones have joined once. Raises Fenced, or
        InvalidRequest for a phase that has not begun.
        """
        if self._barrier.arrive(self.find(Role.WORKER, rank, incarnation), phase):
            return StateChange(BarrierState(released=True))
        reason = "; ".join(self._open_barrier())
        return StateChange(self._barrier.state(phase, self._awaited()), reason)

    def starts(self, used: Sequence[int]) -> bool:
        """Whether the job starts now, on the shards ``used``. The caller changes the view."""
        return not self._view.now.started and self._quorum.complete(used, self._members)

    def _check_journalled(self, ask: JoinRequest) -> None:
        """Raises DamagedData for state of an incarnation that this coordinator's journal should contain."""
        handed_out = self._next_incarnation > ask.data_incarnation not in self._unused_incarnations
        if self._journalled and not handed_out:
            raise DamagedData(
                f"the coordinator's journal is older than the state that shard {ask.index} brings",
                shard=str(ask.index),
                expected=f"a journal that has handed out incarnation {ask.data_incarnation}",
                actual=f"one that has handed out those below {self._unused_incarnations.start}",
                remedy="bring back the newest copy of the coordinator's --data-dir; or begin a new job in another one",
            )

    def _lost_all(self) -> Iterator[str]:
        """Handle the loss of the last live worker: a job with a fixed number of workers starts again with all that are
        not done.
        """
        view = self._view.now
        if view.started and self._quorum.begin_again(view.expected_shards):
            self._change(started=False)
            yield "every worker was lost: the job waits until all expected ones are there again"
        else:
            self._change()

    def _end(self, record: MemberRecord, how: str, now: float) -> str:
        """Remove a member. Returns how it ended: ``how``, unless the job was scaled down and no longer needs this
        worker.
        """
        worker, rank = record.member.role is Role.WORKER, record.member.index
        if worker and how == _LEFT:
            self._scaling.left(rank)
        elif worker and self._scaling.ends(rank, self._members.ranks - {rank}):
            how = _ENDED
        self._members.end(record, how, now)
        self._forget(record)
        return how

    def _forget(self, record: MemberRecord) -> None:
        if record.member.role is Role.WORKER:
            self._barrier.forget(record.member.index)

    def _awaited(self) -> set[int]:
        """The ranks that a barrier awaits."""
        return self._members.ranks | self.expected

    def _open_barrier(self) -> Iterable[str]:
        """Open the barrier if no worker is missing; returns the reason."""
        return self._barrier.open(self._awaited()) if self._view.now.started else ()

    def _change(self, **changes: Any) -> None:
        """Make a new revision of the view with the current members and ``changes``."""
        self._view.change(members=self._members.members, wanted_workers=self._scaling.workers, **changes)
