"""Decides what the coordinator decides: who is a member, where models lie, which mode holds, when barriers open."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from ps_protocol.errors import DamagedData, NotReady, Unavailable
from ps_protocol.model import Consistency, ModelSpec, ShardMap
from ps_protocol.view import (
    BarrierState,
    ClusterStatus,
    ClusterView,
    Joined,
    Member,
    MemberStats,
    Role,
    SyncWord,
)
from ps_server.coordinator.applicant import Applicant, check_applicant, check_free_rank, check_vacant
from ps_server.coordinator.attendance import Attendance
from ps_server.coordinator.barrier import Barrier
from ps_server.coordinator.job_limits import nbytes_of
from ps_server.coordinator.kept_state import KeptState
from ps_server.coordinator.lives import Life, Lives
from ps_server.coordinator.memento import Memento, Place
from ps_server.coordinator.models import Models, PlacementPlan
from ps_server.coordinator.settings import ClusterSettings, check_consistency, check_same_job

_LEFT = "left"
#: How the reason of a worker begins that was told to stop.
_INTERRUPTED = "KeyboardInterrupt"
_STARTS = "all expected members are there: the job starts"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Decision(Generic[T]):
    """What an event led to; ``reason`` says in words what changed, and is empty when nothing did."""

    value: T
    reason: str = ""
    #: Something was lost: people are to see it.
    loss: bool = False


class ClusterState:
    """The cluster as one state machine. Called by the driver, from one loop; does no I/O and reads no clock.

    Times are seconds of any steady clock. An event that raises has changed nothing. ``view.revision`` rises with every
    change of the view; ``phase`` rises when a barrier opens. Neither ever falls, nor do incarnations, also over
    ``memento`` and ``restore``.
    """

    def __init__(self, settings: ClusterSettings, phase: int = 0) -> None:
        """Begin in ``phase``. Raises InvalidRequest when the settings' consistency mode cannot work."""
        check_consistency(settings.consistency, settings.expected_workers)
        self._settings = settings
        self._lives = Lives()
        self._models = Models(settings.partition, settings.limits)
        self._next_incarnation = settings.first_incarnation
        self._journalled = False
        #: Between what an earlier life of a journalled coordinator handed out and this: nobody has such an incarnation.
        self._unused_incarnations = range(0)
        self._attendance = Attendance(settings.expected_workers)
        self._kept_state = KeptState()
        self._barrier = Barrier(phase)
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
        state = cls(replace(settings, consistency=memento.consistency), memento.phase)
        state._next_incarnation = max(memento.next_incarnation, settings.first_incarnation)
        state._journalled = True
        state._unused_incarnations = range(memento.next_incarnation, state._next_incarnation)
        for kept in memento.places.values():
            state._lives.begin(kept, now)
        state._lives.remember(memento.gone)
        state._models.restore(memento.maps)
        state._kept_state = KeptState(memento.newest_state, memento.copies)
        seen = {key for key in state._lives if key[0] is Role.SHARD} if memento.finished else memento.seen
        state._attendance = Attendance(settings.expected_workers, seen)
        state.view = replace(
            state.view,
            revision=memento.revision,
            members=state._lives.members,
            models=state._models.epochs,
            started=memento.started,
            finished=memento.finished,
            expected_shards=memento.shards,
            spare=memento.spare,
        )
        if memento.finished:
            state._change(started=False, finished=False)
        if memento.moving:
            # Shards that hold still for this move have seen the last revision, and wait for a newer one.
            state._change(moving="")
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
            seen=self._attendance.seen,
            newest_state=self._kept_state.newest,
            copies=self._kept_state.copies,
            places=self._lives.places,
            maps=dict(self._models.maps),
            gone=self._lives.gone,
            shards=self.view.expected_shards,
            spare=self.view.spare,
            moving=self.view.moving,
        )

    # Membership

    def join(self, ask: Applicant, now: float) -> Decision[Joined]:
        """Give ``ask`` a place and a new incarnation; a repetition gets the first answer again.

        Whoever held the place is fenced, but only by one that proves to follow on its death, or was told to take over:
        see ``check_vacant``. A shard that is to be added makes the job larger; its number, and those below that are
        new, too, are spare.
        Raises ProtocolVersionMismatch, InvalidRequest, UnknownShard for a shard number out of range, Fenced for a shard
        that brings older state than is known of its place, NotReady for one that yields and a standby too many,
        PlaceTaken for a place that another process holds, or when every rank is held,
        DamagedData when a shard brings state that a whole journal would know of.
        """
        workers = self._settings.expected_workers
        check_applicant(ask, self.view.expected_shards, workers)
        if known := self._lives.by_token(ask.token):
            self._lives.heard(known, now)
            return Decision(known.place.joined)
        if ask.index is None and ask.role is Role.WORKER:
            check_free_rank(workers, self._lives.ranks)
        index = self._lives.lowest_free(ask.role) if ask.index is None else ask.index
        old = self._lives.holder(ask.role, index)
        if ask.role is Role.SHARD and not ask.yields:
            self._check_journalled(ask)
            self._kept_state.check(ask, index)
        check_vacant(ask, old.place.applicant if old else None, old.held(now) if old else "")
        if ask.role is Role.SHARD:
            self._kept_state.take_over(ask, index)
        # Above what the shard brings, too: a coordinator that lost its journal may count from too low.
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
            self.view.revision + 1,
            self._settings.seed,
            self.phase,
        )
        self._lives.begin(Place(ask, joined), now)
        changes: dict[str, Any] = {}
        if ask.adds(before := self.view.expected_shards):
            changes = {"expected_shards": index + 1, "spare": self.view.spare | set(range(before, index + 1))}
            reason += "; it is new in this job, and spare"
        self._attendance.comes((member.role, member.index), started=self.view.started)
        if starts := self._starts(self.view.used_shards):
            reason += f"; {_STARTS}"
        finished = self.view.finished and ask.role is not Role.WORKER
        changes |= {"finished": finished, "released": finished and self.view.released}
        self._change(started=self.view.started or starts, **changes)
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
        life = self._lives.find(role, index, incarnation)
        self._lives.heard(life, now)
        life.stats = stats
        if not keeps_state or role is not Role.SHARD:
            return Decision(None)
        return Decision(None, "; ".join(self._kept_state.says(life.member, life.place.applicant.directory, sync)))

    def beats(self, role: Role) -> Mapping[tuple[int, int], int]:
        """How often each member of ``role`` was heard of, by number and incarnation."""
        return self._lives.beats(role)

    def check_member(self, role: Role, index: int, incarnation: int) -> None:
        """Raises Fenced when the place is not this incarnation's."""
        self._lives.find(role, index, incarnation)

    def leave(self, role: Role, index: int, incarnation: int, why: str, now: float) -> Decision[None]:
        """End a membership; ``why`` is empty at a clean end. When the last worker ends cleanly, the job is finished.

        A worker that ended cleanly is not waited for again. When the last one ends otherwise, all others are.
        A repetition changes nothing. Raises Fenced when the place was lost before.
        """
        if self._lives.fate(role, index, incarnation).startswith(_LEFT):
            return Decision(None)
        life = self._lives.find(role, index, incarnation)
        how = f"{_LEFT}: {why}" if why else _LEFT
        self._end(life, how, now)
        reasons = [f"{life.member} {how}"]
        last = role is Role.WORKER and not self._lives.ranks
        if last and not why and self.view.started:
            reasons.append("every worker has left: the job is finished")
            self._attendance.finish()
            self._change(finished=True)
        elif last and why:
            reasons += self._lost_all()
        else:
            if role is Role.WORKER and not why:
                self._attendance.is_done(index)
            self._change()
        failed = role is Role.WORKER and bool(why) and not why.startswith(_INTERRUPTED)
        return Decision(None, "; ".join([*reasons, *self._open_barrier()]), loss=failed)

    def release(self) -> Decision[None]:
        """What is written at the end of a finished job is there: no member is needed any more."""
        if not self.view.finished or self.view.released:
            return Decision(None)
        self._change(released=True)
        return Decision(None, "no member is needed any more")

    def disconnected(self, role: Role, index: int, incarnation: int, now: float) -> None:
        """The stream on which a member follows the cluster has ended. Also one that is not a member any more."""
        self._lives.disconnected(role, index, incarnation, now)

    def expire(self, now: float) -> Decision[tuple[Member, ...]]:
        """Remove the members whose leases have ended by ``now``. When no worker is left, all are waited for again."""
        ended = self._lives.ended(now)
        if not ended:
            return Decision(())
        for life in ended:
            self._end(life, life.how_expired, now)
        members = tuple(life.member for life in ended)
        reasons = ["no heartbeat, lease ended: " + ", ".join(map(str, members))]
        if not self._lives.ranks and any(member.role is Role.WORKER for member in members):
            reasons += self._lost_all()
        else:
            self._change()
        return Decision(members, "; ".join([*reasons, *self._open_barrier()]), loss=True)

    def next_expiry(self) -> float | None:
        """When the first lease ends if no heartbeat comes; None without members."""
        return self._lives.next_expiry()

    def extend_leases(self, seconds: float) -> None:
        """Give every member ``seconds`` more: for a time in which nobody could have been heard."""
        self._lives.extend(seconds)

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

        Raises NotReady while shards are missing, ModelMismatch with every difference, InvalidRequest,
        UnsupportedOptimizer for a table's, or Fenced.
        """
        plan = self.plan(rank, incarnation, spec, as_saved)
        return self.adopt(rank, incarnation, plan, plan.make())

    def plan(
        self,
        rank: int,
        incarnation: int,
        spec: ModelSpec,
        as_saved: Callable[[ShardMap], ShardMap] | None = None,
    ) -> PlacementPlan:
        """What ``declare`` begins with: ``plan.make()`` may take a while, and may run in any thread. Raises Fenced."""
        member = self._lives.find(Role.WORKER, rank, incarnation).member
        return self._models.plan(spec, str(member), self.view.used_shards, self.view.live(Role.SHARD), as_saved)

    def adopt(self, rank: int, incarnation: int, plan: PlacementPlan, made: ShardMap) -> Decision[ShardMap]:
        """What ``declare`` ends with: ``made`` holds, which ``plan`` led to.

        Raises NotReady while shards are missing, or when meanwhile the cluster's shards have changed, or Fenced.
        """
        member = self._lives.find(Role.WORKER, rank, incarnation).member
        spec = plan.spec
        if plan.known is None and plan.shards != self.view.used_shards:
            raise NotReady(
                f"model '{spec.name}' cannot be placed yet: the shards that models lie on have changed meanwhile",
                remedy="the worker tries again",
            )
        if plan.known is not None or not self._models.place(plan, made, self.view.live(Role.SHARD)):
            return Decision(self._models.get(spec.name))
        self._change(models=self._models.epochs)
        size = f"{nbytes_of(spec)} bytes and {len(spec.tables)} tables"
        return Decision(made, f"{member} declared model '{spec.name}': {size} on {len(plan.shards)} shards")

    def shard_map(self, model: str) -> ShardMap:
        """Where ``model`` lives. Raises UnknownModel."""
        return self._models.get(model)

    @property
    def shard_maps(self) -> Mapping[str, ShardMap]:
        """Where each model lives."""
        return self._models.maps

    @property
    def shard_tokens(self) -> Mapping[int, str]:
        """The token that each live shard joined with, by its incarnation."""
        places = self._lives.places.values()
        shards = (place for place in places if place.joined.member.role is Role.SHARD)
        return {place.joined.member.incarnation: place.applicant.token for place in shards}

    def set_consistency(self, consistency: Consistency) -> Decision[ClusterView]:
        """Change the mode of the job. Raises InvalidRequest when it cannot work."""
        check_consistency(consistency, self._settings.expected_workers)
        before = self.view.consistency
        if consistency == before:
            return Decision(self.view)
        self._change(consistency=consistency)
        return Decision(self.view, f"consistency changed from {before} to {consistency}")

    # Moves of slices and buckets

    def begin_move(self, cut: str) -> Decision[int]:
        """A move named ``cut`` is under way from the revision returned until it is committed or aborted.

        Raises NotReady while another one is.
        """
        if self.view.moving:
            raise NotReady(
                "slices are being moved already", actual=f"move {self.view.moving}", remedy="wait until that has ended"
            )
        self._change(moving=cut)
        return Decision(self.view.revision, f"move {cut} begins")

    def commit_move(self, cut: str, maps: Sequence[ShardMap], prepared: Mapping[int, int]) -> Decision[None]:
        """From now on models lie as ``maps`` say, each one epoch on; shards that get something are spare no more.

        ``prepared``: the incarnation of each shard that has everything it needs for that on disk. Raises Unavailable
        when the move was given up, or one of these, or a shard that holds something before or after, is not there any
        more; UnknownModel, InvalidRequest for other maps than the next.
        """
        if self.view.moving != cut:
            raise Unavailable("this move of slices was given up", actual=f"move {cut}", remedy="move again")
        live = {number: member.incarnation for number, member in self.view.live(Role.SHARD).items()}
        self._models.move(maps, prepared, live)
        self._change(models=self._models.epochs, moving="", spare=self.view.spare - self._models.holders)
        moved = ", ".join(f"'{m.spec.name}' to epoch {m.epoch}" for m in maps)
        return Decision(None, f"move {cut} is made: {moved}")

    def abort_move(self, cut: str) -> Decision[None]:
        """The move ``cut`` will not be. Nothing happens when it has been decided before."""
        if self.view.moving != cut:
            return Decision(None)
        self._change(moving="")
        return Decision(None, f"move {cut} is given up")

    def use_shards(self, numbers: Collection[int]) -> Decision[None]:
        """New models are placed on these shards, and all others are spare: nobody waits for them.

        Raises InvalidRequest for numbers that the job does not have, NotReady when another shard holds anything.
        """
        spare = self._models.spare(numbers, self.view.expected_shards)
        if spare == self.view.spare:
            return Decision(None)
        used = sorted(numbers)
        starts = self._starts(used)
        self._change(spare=spare, started=self.view.started or starts)
        reason = f"models lie on the shards {', '.join(map(str, used))}"
        return Decision(None, f"{reason}; {_STARTS}" if starts else reason)

    # Barriers

    def arrive(self, rank: int, incarnation: int, phase: int) -> Decision[BarrierState]:
        """A worker reaches the barrier that ends ``phase``, for the first time or again.

        It opens when every live worker is there, and all expected ones have been there once. Raises Fenced, or
        InvalidRequest for a phase that has not begun.
        """
        member = self._lives.find(Role.WORKER, rank, incarnation).member
        if self._barrier.arrive(member, phase):
            return Decision(BarrierState(released=True))
        reason = "; ".join(self._open_barrier())
        return Decision(self._barrier.state(phase, self._awaited()), reason)

    @property
    def phase(self) -> int:
        """Barriers passed."""
        return self._barrier.phase

    def status(self, now: float) -> ClusterStatus:
        """The view, the live members with their statistics, and the last that went."""
        return ClusterStatus(self.view, self._lives.statuses(now))

    # Inner workings

    def _check_journalled(self, ask: Applicant) -> None:
        """Raises DamagedData for state of an incarnation that the journal this goes on from should have handed out."""
        handed_out = self._next_incarnation > ask.data_incarnation not in self._unused_incarnations
        if self._journalled and not handed_out:
            raise DamagedData(
                f"the coordinator's journal is older than the state that shard {ask.index} brings",
                shard=str(ask.index),
                expected=f"a journal that has handed out incarnation {ask.data_incarnation}",
                actual=f"one that has handed out those below {self._unused_incarnations.start}",
                remedy="bring back the newest copy of the coordinator's --data-dir; or begin a new job in another one",
            )

    def _starts(self, used: Sequence[int]) -> bool:
        """Whether the job starts now, on the shards ``used``."""
        return not self.view.started and self._attendance.complete(used, self._lives)

    def _lost_all(self) -> Iterator[str]:
        """The last live worker was lost: a job of a fixed number of workers begins again with all that are not done."""
        if self.view.started and self._attendance.begin_again(self.view.expected_shards):
            self._change(started=False)
            yield "every worker was lost: the job waits until all expected ones are there again"
        else:
            self._change()

    def _end(self, life: Life, how: str, now: float) -> None:
        self._lives.end(life, how, now)
        if life.member.role is Role.WORKER:
            self._barrier.forget(life.member.index)

    def _awaited(self) -> set[int]:
        """The ranks that a barrier waits for."""
        return self._lives.ranks | (set() if self.view.started else self._attendance.missing)

    def _open_barrier(self) -> Iterator[str]:
        """Open the barrier if nobody is missing; yields the reason."""
        if self.view.started:
            yield from self._barrier.open(self._awaited())

    def _change(self, **changes: Any) -> None:
        """One new revision of the view with the present members and ``changes``."""
        self.view = replace(self.view, revision=self.view.revision + 1, members=self._lives.members, **changes)
