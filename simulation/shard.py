"""The shard's shell in the simulation: ShardModel, StepStream and Registry in small, around the real decisions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ps_protocol.errors import Fenced, PsError, StateLost, StorageFull, Unavailable
from ps_protocol.model import ShardMap
from ps_protocol.view import ClusterView, Role
from ps_server.consistency import Decision, ParkedPulls, Position, PushInfo, Tracker, Verdict, WorkerKey
from ps_server.coordinator.applicant import Applicant
from ps_server.log import Loaded, Placed, Update
from ps_server.optimizers import Step
from ps_server.shard.registry import PATIENCE_SECONDS
from simulation.coordinator import SeenView
from simulation.disk import Disk, DiskLog, SavedSnapshot
from simulation.member import SimMembership
from simulation.network import Reply, Stream
from simulation.restore import PARTS, SimReplica, new_replica, restore, write_values
from simulation.scheduler import Killed, Process
from simulation.world_parts import Shared

_RETRY_SECONDS = 0.5
_OPTIONS: tuple[dict[str, Any], ...] = ({},)

POINTS = ("before_log", "within_log", "after_log_before_apply", "after_apply_before_reply", "snapshot", "before_cut")
"""Where a shard can be made to die: the failpoints of the real one, and moments of writing."""


@dataclass(slots=True, eq=False)
class SimPush:
    """A push that has arrived whole."""

    info: PushInfo
    values: list[int]


@dataclass(slots=True, eq=False)
class SimAnswer:
    """What is still to be sent for one push."""

    info: PushInfo
    decision: Decision


class SimShard:
    """One process that serves shard ``number`` from ``disk``. A later one of the same disk is another object."""

    def __init__(
        self,
        shared: Shared,
        number: int,
        disk: Disk,
        name: str,
        on_end: Callable[[SimShard], None],
        *,
        from_old_copy: bool = False,
    ) -> None:
        """``from_old_copy``: it must be refused, so what it restores is nobody's state."""
        self.shared = shared
        self.number = number
        self.disk = disk
        self.process = Process(name)
        self.streams: dict[Stream, None] = {}
        #: How often each point is still passed before the process dies there.
        self.armed: dict[str, int] = {}
        self.serving = False
        self.incarnation = 0
        self.replica: SimReplica | None = None
        self.placed = False
        self.view = SeenView(ClusterView())
        self._on_end = on_end
        self._scheduler = shared.scheduler
        self._parked: ParkedPulls[Stream] = ParkedPulls()
        self._held: dict[tuple[WorkerKey, int], SimPush] = {}
        #: When the rounds are looked at again though nothing has happened.
        self._alarm: float | None = None
        self._lane: deque[Callable[[], None]] = deque()
        self._submitted = self._done = 0
        self._behind_lane: deque[tuple[int, Callable[[], None]]] = deque()
        #: Opens that wait for a view or a model, and until when.
        self._early: list[tuple[float, Stream, tuple[Any, ...]]] = []
        self._snapshot_under_way = False
        self._loads = 0
        self._fetching = False
        self._mode_seen: Any = None
        self._membership = SimMembership(
            shared.scheduler, shared.network, shared.coordinator, self.process, self._on_view, self._on_fenced
        )
        self._begin(from_old_copy)

    @property
    def tracker(self) -> Tracker:
        """Of the one model."""
        assert self.replica is not None
        return self.replica.tracker

    @property
    def has_values(self) -> bool:
        """Whether anything would be lost with it."""
        return self.replica is not None and self.replica.initialised

    @property
    def idle(self) -> bool:
        """Whether everything decided is done."""
        return self._done == self._submitted

    # The life of the process

    def _begin(self, from_old_copy: bool) -> None:
        disk, shared = self.disk, self.shared
        disk.held = True
        disk.life += 1
        found = restore(disk, self.number, shared.judge.map_placed, log_goes_on=shared.plan.durable)
        self.replica = found.replica
        self.log = DiskLog(disk, found.number, found.end, writing=shared.plan.durable)
        brought = disk.incarnation if found.replica else 0
        if from_old_copy:
            pass
        elif found.replica:
            shared.judge.restored(self.number, found.replica.tracker, found.replica.values)
        else:
            shared.judge.restored_nothing(self.number)
        self._scheduler.say(self.process.name, "starts with record", found.number, "of incarnation", brought)
        ask = Applicant(
            Role.SHARD,
            self.number,
            self.process.name,
            f"token of {self.process.name}",
            data_incarnation=brought,
            lineage=f"shard {self.number}",
        )
        shared.shards_by_address[self.process.name] = self
        self._scheduler.after(
            self._scheduler.random.random() * shared.plan.restart_seconds, self.process, self._join, ask
        )

    def _join(self, ask: Applicant) -> None:
        self._membership.join(ask, self._joined)

    def _joined(self) -> None:
        self.incarnation = self._membership.member.incarnation
        # First the disk says whose it is, then the coordinator hears of it, then pushes are taken.
        self.disk.incarnation = self.incarnation
        self._membership.announce_state(self._serve)

    def _serve(self) -> None:
        self.serving = True
        self._on_view(self._membership.view)
        if self.shared.plan.snapshot_seconds:
            self._scheduler.after(self.shared.plan.snapshot_seconds, self.process, self._snapshot_due)

    def _on_fenced(self, error: Fenced) -> None:
        self._scheduler.say(self.process.name, "is fenced:", error.message)
        self._end_well()
        self.end()

    def _end_well(self) -> None:
        """As a process does that ends by itself: finish what is decided, and keep it in a last snapshot."""
        while self._lane:
            self._lane.popleft()()
            self._done += 1
        if (
            not self.has_values
            or not self.serving
            or self.disk.full
            or (not self.log.writing and not self.log.resume())
        ):
            return
        number = self.log.number
        parts = [(number, value) for value in self.replica.values] if self.replica else []
        memento, goes_on = self.tracker.memento(), self.shared.plan.durable
        self.disk.snapshot = SavedSnapshot(number, number, goes_on, True, memento, number, parts)
        self.log.cut(number)

    def end(self) -> None:
        """Die now, with everything that is not on disk."""
        self.process.die()
        self.disk.held = False
        self.shared.network.died(self.process)
        for stream in list(self.streams):
            stream.break_off()
        self.streams.clear()
        self._on_end(self)

    def _pass(self, point: str) -> None:
        if point in self.armed:
            self.armed[point] -= 1
            if self.armed[point] <= 0:
                self._scheduler.say(self.process.name, "dies", point)
                self.end()
                raise Killed

    # The registry: views and placement

    def _on_view(self, view: SeenView) -> None:
        if not self.serving or view.revision <= self.view.revision:
            return
        self.view = view
        if self.placed:
            if view.view.consistency != self._mode_seen:
                self._configure()
            self._members()
        elif view.view.models and not self._fetching:
            self._fetching = True
            self._fetch()
        self._look_at_early()

    def _configure(self) -> None:
        self._mode_seen = self.view.view.consistency
        self.tracker.configure(self._mode_seen)
        self.shared.judge.configured(self.number, self._mode_seen)
        self._advance()

    def _members(self) -> None:
        live = self.view.workers
        self.shared.judge.members(self.number, live)
        self.tracker.members(live)
        self._advance()

    def _fetch(self) -> None:
        def answered(value: Any) -> None:
            if isinstance(value, ShardMap):
                if not self.placed:
                    self._place(value)
            else:
                self._scheduler.after(_RETRY_SECONDS, self.process, self._fetch)

        shared = self.shared
        shared.network.call(self.process, shared.coordinator.process, shared.coordinator.shard_map, answered, "model")

    def _place(self, shard_map: ShardMap) -> None:
        if self.replica is None:
            if not self.log.reserve():
                self._scheduler.after(_RETRY_SECONDS, self.process, self._place, shard_map)
                return
            self.log.reserved -= 1
            self.replica = new_replica(shard_map, self.number)
            self._submit(lambda: self._append(Placed(shard_map)))
        elif self.replica.shard_map != shard_map:
            self.shared.judge.fail(f"shard {self.number} holds another map than the cluster has placed")
        self._gradients = self.replica.gradients
        self.placed = True
        self._mode_seen = self.view.view.consistency
        self.tracker.configure(self._mode_seen)
        self.shared.judge.configured(self.number, self._mode_seen)
        self._members()
        self._look_at_early()

    # Streams

    def open(self, stream: Stream, rank: int, incarnation: int, revision: int, phase: int, clock: int | None) -> None:
        """A worker opens its stream: it waits for the view and the model it names, if they are on their way."""
        self.streams[stream] = None
        asked = (rank, incarnation, revision, phase, clock)
        if self._knows(revision):
            self._attach(stream, rank, incarnation, phase, clock)
        else:
            deadline = self._scheduler.now + PATIENCE_SECONDS
            self._early.append((deadline, stream, asked))
            self._scheduler.at(deadline, self.process, self._look_at_early)

    def _knows(self, revision: int) -> bool:
        return self.placed and self.view.revision >= revision

    def _look_at_early(self) -> None:
        early, self._early = self._early, []
        for deadline, stream, asked in early:
            if not stream.server_open:
                continue
            if self._knows(asked[2]):
                self._attach(stream, asked[0], asked[1], *asked[3:])
            elif self._scheduler.now >= deadline:
                self._refuse(stream, Unavailable("this shard has not heard from the coordinator"))
            else:
                self._early.append((deadline, stream, asked))

    def _attach(self, stream: Stream, rank: int, incarnation: int, phase: int, clock: int | None) -> None:
        worker = WorkerKey(rank, incarnation)
        try:
            position = self.tracker.attach(worker, phase, clock)
        except PsError as error:
            self._refuse(stream, error)
            return
        stream.worker_key = worker
        self.shared.judge.attached(self.number, worker, position)
        self._scheduler.say(self.process.name, worker, "opened at", position)
        self._advance()
        assert self.replica is not None
        last = self.tracker.last_sequence(worker)
        stream.down(stream.lane.opened, self.tracker.version, position, last, self.replica.initialised)

    def _refuse(self, stream: Stream, error: PsError) -> None:
        stream.down(stream.lane.refused, error)
        self.stream_ended(stream)

    def stream_ended(self, stream: Stream) -> None:
        """The stream broke, or was closed by the other side."""
        if stream.server_open:
            stream.server_open = False
            self._parked.discard(stream)
            self.streams.pop(stream, None)

    def arrive(self, stream: Stream, phase: int) -> None:
        """A worker enters a barrier."""
        if not stream.server_open or stream.worker_key is None:
            return
        try:
            self.tracker.arrive(stream.worker_key, phase)
        except PsError as error:
            self._refuse(stream, error)
            return
        self.shared.judge.arrived(self.number, stream.worker_key, phase)
        self._advance()

    def push(self, stream: Stream, sequence: int, position: Position, pulled: int, skipped: bool, value: int) -> None:
        """One whole push."""
        if not stream.server_open or stream.worker_key is None:
            return
        assert self.replica is not None
        info = PushInfo(stream.worker_key, sequence, position, pulled, skipped)
        if not self.replica.initialised:
            self._refuse(stream, StateLost("no values"))
            return
        if not self.log.reserve():
            stream.down(stream.lane.refused_push, StorageFull("no room"))
            return
        try:
            decision = self.tracker.push(info)
        except Fenced as error:
            self.log.reserved -= 1
            self._refuse(stream, error)
            return
        except PsError as error:
            self.log.reserved -= 1
            stream.down(stream.lane.refused_push, error)
            return
        self.shared.judge.decided_push(self.number, info, decision)
        pushed = SimPush(info, [value, value >> 3])
        if decision.verdict is Verdict.APPLY:
            self._queue([pushed], self.tracker.version, is_round=False)
        elif decision.verdict is Verdict.HOLD:
            self._held[info.worker, sequence] = pushed
        else:
            self.log.reserved -= 1
        self._advance()
        stream.pending = SimAnswer(info, decision)
        self._pump(stream)

    def _pump(self, stream: Stream) -> None:
        """Answer what is pending on ``stream`` if its pull may be answered now, else park it."""
        answer = stream.pending
        if answer is None or not stream.server_open:
            return
        if not self.tracker.may_pull(answer.info.position):
            self._parked.park(answer.info.position, stream)
            return
        self.shared.judge.answers_pull(self.number, answer.info)
        self._after_lane(lambda: self._reply(stream, answer))

    def _reply(self, stream: Stream, answer: SimAnswer) -> None:
        if stream.pending is not answer or not stream.server_open:
            return
        self._pass("after_apply_before_reply")
        stream.pending = None
        tracker, info, verdict = self.tracker, answer.info, answer.decision.verdict
        clock = tracker.resume(info.position).clock if verdict is Verdict.LATE else info.position.clock
        assert self.replica is not None
        self.shared.judge.replied(self.number, self.incarnation, info, verdict, self.replica.values)
        stream.down(stream.lane.answered, info.sequence, verdict, clock, tracker.version)

    def _advance(self) -> None:
        """After every event: make the rounds that became complete, then answer the pulls that may be answered."""
        for ready in self.tracker.take_ready(self._scheduler.now):
            self.shared.judge.round_decided(self.number, ready.position, ready.contributions)
            pushes = [self._held.pop((info.worker, info.sequence)) for info in ready.contributions]
            if pushes:
                self._queue(pushes, ready.version, is_round=True)
        if (ends := self.tracker.grace_ends) not in (None, self._alarm):
            self._alarm = ends
            self._scheduler.at(ends, self.process, self._grace_over)
        for stream in self._parked.release(self.tracker):
            self._pump(stream)

    def _grace_over(self) -> None:
        self._alarm = None
        self._advance()

    # The lane

    def _queue(self, pushes: list[SimPush], version: int, *, is_round: bool) -> None:
        def work() -> None:
            values = [sum(push.values[part] for push in pushes) for part in range(PARTS)]
            infos = tuple(push.info for push in pushes)
            write_values(values, self._gradients)
            update = Update("model", version, infos, is_round, Step(self._gradients, frozenset(), _OPTIONS))
            self._pass("before_log")
            self._append(update)
            self.shared.judge.logged(self.number, version, infos, values, is_round)
            who = [(info.worker.rank, info.worker.incarnation, info.sequence, str(info.position)) for info in infos]
            self._scheduler.say(self.process.name, "version", version, "of", who)
            self._pass("after_log_before_apply")
            assert self.replica is not None
            self.replica.values = [old + new for old, new in zip(self.replica.values, values, strict=True)]
            self.log.reserved -= len(pushes)

        self._submit(work)

    def _append(self, entry: Placed | Loaded | Update) -> None:
        if self.armed.get("within_log") == 1:
            self.log.append(entry, self._scheduler.random.random())
        self._pass("within_log")
        self.log.append(entry)

    def _submit(self, work: Callable[[], None]) -> None:
        self._submitted += 1
        seconds = self.shared.plan.lane_seconds
        if not seconds and not self._lane:
            work()
            self._done += 1
            return
        self._lane.append(work)
        if len(self._lane) == 1:
            self._scheduler.after(seconds, self.process, self._run_lane)

    def _run_lane(self) -> None:
        self._lane[0]()
        self._lane.popleft()
        self._done += 1
        if self._lane:
            self._scheduler.after(self.shared.plan.lane_seconds, self.process, self._run_lane)
        while self._behind_lane and self._behind_lane[0][0] <= self._done:
            self._behind_lane.popleft()[1]()

    def _after_lane(self, then: Callable[[], None]) -> None:
        """``then`` follows once everything submitted so far is done."""
        if self._done == self._submitted:
            then()
        else:
            self._behind_lane.append((self._submitted, then))

    # Values

    def load(self, reply: Reply, values: list[int]) -> None:
        """Initial values; the first win."""
        if not self.serving or not self.placed:
            reply(Unavailable("not yet"))
            return
        assert self.replica is not None
        if self.replica.initialised:
            reply(False)
            return
        if not self.log.reserve():
            reply(StorageFull("no room"))
            return
        replica, self.replica.initialised = self.replica, True

        def work() -> None:
            write_values(values, self._gradients)
            replica.values = list(values)
            self._append(Loaded("model", self._gradients, None))
            self.shared.judge.loaded(self.number, values)
            self._loads += 1
            self.log.reserved -= 1

        self._submit(work)
        self._after_lane(lambda: reply(True))

    def initialised(self, reply: Reply) -> None:
        """Whether there are values."""
        if not self.serving or not self.placed:
            reply(Unavailable("not yet"))
            return
        assert self.replica is not None
        reply(self.replica.initialised)

    # Snapshots

    def _snapshot_due(self) -> None:
        plan, random = self.shared.plan, self._scheduler.random
        self._scheduler.after(plan.snapshot_seconds * (0.5 + random.random()), self.process, self._snapshot_due)
        if self.placed and not self._snapshot_under_way:
            self._snapshot_under_way = True
            self._submit(self._begin_snapshot)

    def _begin_snapshot(self) -> None:
        if self.shared.plan.durable or self.log.resume():
            self._later(self._describe, self._loads)
        else:
            self._snapshot_under_way = False

    def _describe(self, loads: int) -> None:
        assert self.replica is not None
        saved = SavedSnapshot(0, 0, self.shared.plan.durable, self.replica.initialised, self.tracker.memento(), 0, [])

        def number() -> None:
            saved.tracker_number = self.log.number
            self._later(self._copy_part, saved, loads)

        self._submit(number)

    def _copy_part(self, saved: SavedSnapshot, loads: int) -> None:
        def copy() -> None:
            assert self.replica is not None
            saved.parts.append((self.log.number, self.replica.values[len(saved.parts)]))
            self._later(self._copy_part if len(saved.parts) < PARTS else self._through, saved, loads)

        self._submit(copy)

    def _through(self, saved: SavedSnapshot, loads: int) -> None:
        if loads != self._loads:
            self._describe(self._loads)
            return

        def reached() -> None:
            saved.through = self.log.number
            self._later(self._commit, saved)

        self._submit(reached)

    def _commit(self, saved: SavedSnapshot) -> None:
        if self.disk.full:
            self._end_snapshot()
            return
        self._pass("snapshot")
        saved.number = min([saved.tracker_number, *(number for number, _ in saved.parts)])
        self.disk.snapshot = saved
        self._scheduler.say(self.process.name, "snapshot from", saved.number, "through", saved.through)
        self._later(self._cut, saved)

    def _cut(self, saved: SavedSnapshot) -> None:
        self._pass("before_cut")
        self.log.cut(saved.number)
        self._end_snapshot()

    def _end_snapshot(self) -> None:
        def ended() -> None:
            if not self.shared.plan.durable:
                self.log.pause()
            self._snapshot_under_way = False

        self._submit(ended)

    def _later(self, do: Callable[..., None], *arguments: Any) -> None:
        self._scheduler.after(self._scheduler.random.random() * 0.05, self.process, do, *arguments)
