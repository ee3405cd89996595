"""The worker's shell in the simulation: StepPipeline, Lane and Session in small, as one generator that waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

from ps_protocol.errors import Fenced, NotReady, PsError, StateLost, StorageFull, Unavailable
from ps_protocol.leases import LeaseAnswer, LeaseAsk, Span
from ps_protocol.view import Member, Role
from ps_server.consistency import Position, Verdict
from ps_server.coordinator.applicant import Applicant
from simulation.coordinator import SeenView
from simulation.member import SimMembership
from simulation.network import Stream
from simulation.scheduler import Process
from simulation.shard import SimShard
from simulation.world_parts import Shared

_FULL_SECONDS = 0.5
_SIGN_SECONDS = 5.0
_PERSIST_SECONDS = 0.2
_POLL_SECONDS = 0.3
_BARRIER_WAIT_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 2.0
_GIVE_UP_SECONDS = 60.0

Steps = Generator[None, Any, Any]


@dataclass(slots=True)
class Standing:
    """What a shard says when a stream opens."""

    version: int
    position: Position
    last_sequence: int
    initialised: bool


@dataclass(slots=True)
class Receipt:
    """What a shard says to a push."""

    sequence: int
    verdict: Verdict
    clock: int
    version: int


@dataclass(frozen=True, slots=True)
class SentPush:
    """One push, the same for all shards."""

    sequence: int
    position: Position
    skipped: bool


class SimLane:
    """One worker's end of its stream to one shard; ``inbox`` holds what came and was not looked at yet."""

    __slots__ = ("alive", "inbox", "opened_to", "shard", "stream", "version", "worker")

    def __init__(self, worker: SimWorker, shard: int) -> None:
        self.worker = worker
        self.shard = shard
        self.stream: Stream | None = None
        self.alive = False
        self.opened_to = 0
        self.version = 0
        self.inbox: Any = None

    def drop(self) -> None:
        """End the stream; what is under way on it is not heard any more."""
        if self.stream is not None and self.alive:
            self.stream.close()
        self.stream, self.alive, self.inbox = None, False, None

    def opened(self, stream: Stream, version: int, position: Position, last: int, initialised: bool) -> None:
        """The shard has opened ``stream``."""
        self._take(stream, Standing(version, position, last, initialised))

    def answered(self, stream: Stream, sequence: int, verdict: Verdict, clock: int, version: int) -> None:
        """The shard has answered a push."""
        self._take(stream, Receipt(sequence, verdict, clock, version))

    def refused_push(self, stream: Stream, error: PsError) -> None:
        """The shard has refused a push; the stream goes on."""
        self._take(stream, error)

    def refused(self, stream: Stream, error: PsError) -> None:
        """The shard has ended the stream with an error."""
        if stream is self.stream:
            self.alive = False
            self._take(stream, error)

    def broken(self, stream: Stream) -> None:
        """The stream is found broken."""
        if stream is self.stream and self.alive:
            self.alive = False
            # An answer that came before is still there to be read.
            if self.inbox is None:
                self._take(stream, Unavailable("the stream broke"))

    def _take(self, stream: Stream, value: Any) -> None:
        if stream is self.stream:
            self.inbox = value
            self.worker.look_at(self)


class SimWorker:
    """One life of the worker of one rank: it joins, makes the steps of its plan, passes barriers, and leaves."""

    def __init__(self, shared: Shared, name: str, rank: int | None, on_end: Callable[[SimWorker, str], None]) -> None:
        self.shared = shared
        self.process = Process(name)
        self.rank = rank
        #: Another process was started in its place; nobody starts this one again.
        self.replaced = False
        self.steps_made = 0
        self._scheduler = shared.scheduler
        self._on_end = on_end
        self._ended = False
        self._lanes = [SimLane(self, shard) for shard in range(shared.plan.shards)]
        self._shards: dict[int, Member] = {}
        self._seen: SeenView | None = None
        self._phase = 0
        self._position = Position(0, 0)
        self._sequence = 0
        self._started = False
        self._waits_for: SimLane | None = None
        self._taking_turns = False
        #: A shard waited for has said that it waits.
        self._has_sign = False
        self._ticket = 0
        self._data = _DataShare()
        self._membership = SimMembership(
            shared.scheduler, shared.network, shared.coordinator, self.process, self._on_view, self._on_fenced
        )
        self._generator = self._guarded()
        self._scheduler.after(0.0, self.process, self._continue, None)

    @property
    def lanes(self) -> list[SimLane]:
        """One per shard."""
        return self._lanes

    def doing(self) -> str:
        """For the report of a job that does not end."""
        waits = f"waits for shard {self._waits_for.shard}" if self._waits_for else "waits for a call or a pause"
        return f"{self.process.name} at {self._position} after {self.steps_made} steps {waits}"

    def crash(self) -> None:
        """Die at once."""
        self._end("killed")

    # The process

    def _guarded(self) -> Steps:
        try:
            yield from self._life()
        except Fenced as error:
            self._scheduler.say(self.process.name, "is fenced:", error.message)
            self._end("fenced")
        except StateLost as error:
            self._scheduler.say(self.process.name, "gives up:", error.message)
            self._end("lost")
        except Unavailable as error:
            self._scheduler.say(self.process.name, "gives up:", error.message)
            self._end("gave up")
        except PsError as error:
            self.shared.judge.fail(f"{self.process.name}, which kept to the rules, was refused: {error}")

    def _life(self) -> Steps:
        name = self.process.name
        self._membership.join(
            Applicant(Role.WORKER, self.rank, "", f"token of {name}", lineage=f"worker {self.rank}"), self._wake
        )
        yield
        self._phase = self._membership.joined.phase if self._membership.joined else 0
        while not (self._membership.view.view.started):
            yield from self._sleep(_POLL_SECONDS)
        coordinator, plan = self.shared.coordinator, self.shared.plan
        member = self._membership.member
        yield from self._persist(coordinator.process, coordinator.declare, member, plan.spec)
        yield from self._start()
        while self._phase < plan.phases:
            for _ in range(plan.steps):
                yield from self._sleep(plan.think_seconds * self._scheduler.random.expovariate(1.0))
                if plan.data_items:
                    yield from self._take_data()
                yield from self._exchange()
            if self._phase + 1 == plan.phases:
                break
            yield from self._pass_barrier()
        self._membership.leave("", lambda: self._end("finished"))
        yield

    def _end(self, how: str) -> None:
        if self._ended:
            return
        self._ended = True
        self.process.die()
        for lane in self._lanes:
            if lane.stream is not None and lane.alive:
                if how == "finished":
                    lane.stream.shard.stream_ended(lane.stream)
                else:
                    lane.stream.break_off()
        self._on_end(self, "replaced" if self.replaced else how)

    def _on_view(self, view: SeenView) -> None:
        """The membership keeps it; the worker looks when it needs it."""

    def _on_fenced(self, error: Fenced) -> None:
        self._scheduler.say(self.process.name, "is fenced:", error.message)
        self._end("fenced")

    # Steps

    def _start(self) -> Steps:
        standings = []
        for lane in self._lanes:
            standings.append((yield from self._open_at_start(lane)))
        empty = [lane for lane, s in zip(self._lanes, standings, strict=True) if not s.initialised]
        if any(standing.version > 0 for standing in standings):
            for lane in empty:
                yield from self._check_values(lane)
        else:
            yield from self._initialise(empty)
        self._started = True

    def _check_values(self, lane: SimLane) -> Steps:
        shard = yield from self._shard(lane)
        if not (yield from self._persist_with(lane, shard, shard.initialised)):
            raise StateLost(f"shard {lane.shard} has no values")

    def _initialise(self, empty: list[SimLane]) -> Steps:
        while empty:
            workers = self._membership.view.workers
            if self._membership.member.index == min(workers, default=-1):
                for lane in empty:
                    yield from self._load(lane)
                return
            left = []
            for lane in empty:
                shard = yield from self._shard(lane)
                if not (yield from self._persist_with(lane, shard, shard.initialised)):
                    left.append(lane)
            empty = left
            if empty:
                yield from self._sleep(_POLL_SECONDS)

    def _load(self, lane: SimLane) -> Steps:
        while True:
            shard = yield from self._shard(lane)
            values = [1000 * (lane.shard + 1), 77]
            try:
                yield from self._persist_with(lane, shard, shard.load, values)
            except StorageFull:
                yield from self._sleep(_FULL_SECONDS)
            else:
                return

    def _exchange(self) -> Steps:
        yield from self._ensure_open()
        skipped = self._scheduler.random.random() < self.shared.plan.skipped
        position = max(self._position, Position(self._phase, 0))
        self._sequence += 1
        self._position = Position(position.phase, position.clock + 1)
        push = SentPush(self._sequence, self._position, skipped)
        for lane in self._lanes:
            self._send(lane, push)
        clock = yield from self._answers(push)
        self._position = max(self._position, Position(push.position.phase, clock))
        self.steps_made += 1

    def _send(self, lane: SimLane, push: SentPush) -> None:
        if lane.stream is not None and lane.alive:
            member = self._membership.member
            # Another number for each push and shard, so that sums tell which were added.
            value = (member.incarnation * 1_000_003 + push.sequence * 4_099 + lane.shard) * 2_654_435_761 % (1 << 31)
            self.shared.judge.sent(lane.shard, member, push.sequence, push.skipped, [value, value >> 3])
            stream = lane.stream
            stream.up(_push_at_shard, push.sequence, push.position, lane.version, push.skipped, value)

    def _answers(self, push: SentPush) -> Steps:
        """The highest clock that a shard answers; shards are waited for in turns."""
        clock = 0
        pauses = dict.fromkeys(self._lanes, 0.1)
        began = self._scheduler.now
        turns = deque(self._lanes)
        self._taking_turns, self._has_sign = True, False
        self._scheduler.after(_SIGN_SECONDS, self.process, self._sign_of_life, push)
        while turns:
            lane = turns.popleft()
            was_open = lane.stream is not None
            try:
                if not was_open:
                    yield from self._open(lane, Position(push.position.phase, push.position.clock - 1))
                    self._send(lane, push)
                receipt = yield from self._receive(lane, in_turns=True)
            except Unavailable as error:
                lane.drop()
                if self._scheduler.now - began > _GIVE_UP_SECONDS:
                    raise
                self._scheduler.say(self.process.name, "shard", lane.shard, "away:", error.message)
                yield from self._sleep(pauses[lane])
                pauses[lane] = min(2 * pauses[lane], _LONGEST_PAUSE_SECONDS)
                if was_open:
                    turns.appendleft(lane)
                    continue
                receipt = None
            if isinstance(receipt, StorageFull):
                yield from self._sleep(_FULL_SECONDS)
                self._send(lane, push)
                receipt = None
            if receipt is None:
                turns.append(lane)
                for other in self._lanes:
                    if other not in turns and not self._is_open(other):
                        try:
                            yield from self._open(other, push.position)
                        except Unavailable:
                            other.drop()
                continue
            self.shared.judge.received(lane.shard, self._membership.member, receipt)
            lane.version = receipt.version
            clock = max(clock, receipt.clock)
        self._taking_turns = False
        return clock

    def _ensure_open(self) -> Steps:
        for lane in self._lanes:
            if not self._is_open(lane):
                yield from self._open_at_start(lane)

    def _is_open(self, lane: SimLane) -> bool:
        return lane.alive and self._member_of(lane.shard).incarnation == lane.opened_to

    def _open_at_start(self, lane: SimLane) -> Steps:
        pause, began = 0.1, self._scheduler.now
        while True:
            try:
                standing = yield from self._open(lane)
            except Unavailable:
                lane.drop()
                if self._scheduler.now - began > _GIVE_UP_SECONDS:
                    raise
                yield from self._sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            else:
                self._position = max(self._position, standing.position)
                return standing

    def _open(self, lane: SimLane, position: Position | None = None) -> Steps:
        lane.drop()
        found = self._member_of(lane.shard)
        shard = self.shared.shards_by_address[found.address]
        yield from self._reach(shard)
        lane.opened_to = found.incarnation
        stream = lane.stream = Stream(self.shared.network, self._scheduler, self.process, shard, lane)
        shard.streams[stream] = None
        lane.alive = True
        member = self._membership.member
        revision = self._membership.view.revision
        position = position or self._position
        told = position.clock if position.phase == self._phase else 0
        clock = told if self._started else None
        stream.up(_open_at_shard, member.index, member.incarnation, revision, self._phase, clock)
        standing = yield from self._receive(lane)
        lane.version = standing.version
        if self._started and not standing.initialised:
            raise StateLost(f"shard {lane.shard} came back without values")
        return standing

    def _pass_barrier(self) -> Steps:
        coordinator, member = self.shared.coordinator, self._membership.member
        while True:
            yield from self._ensure_open()
            for lane in self._lanes:
                if lane.stream is not None and lane.alive:
                    lane.stream.up(_arrive_at_shard, self._phase)
            state = yield from self._persist(
                coordinator.process, coordinator.barrier, member, self._phase, _BARRIER_WAIT_SECONDS
            )
            if state.released:
                break
        self._phase += 1

    def _take_data(self) -> Steps:
        coordinator, data = self.shared.coordinator, self._data
        if data.left or data.finished:
            data.left = max(0, data.left - 1)
            return
        data.sequence += 1
        trained = (data.span,) if data.span else ()
        length = self.shared.plan.data_items
        ask = LeaseAsk("data", length, 0, 4, data.sequence, trained, 0)
        member = self._membership.member
        answer: LeaseAnswer = yield from self._persist(coordinator.process, coordinator.lease_data, member, ask, 0.0)
        data.span, data.left = answer.span, len(answer.span) - 1 if answer.span else 0
        data.finished = answer.done

    # Waiting

    def look_at(self, lane: SimLane) -> None:
        """Something came for ``lane``."""
        if self._waits_for is lane:
            self._continue(None)

    def _receive(self, lane: SimLane, *, in_turns: bool = False) -> Steps:
        """What the shard says next. Raises what it refused with, or Unavailable.

        ``in_turns``: None when the shard says that it waits.
        """
        if lane.stream is None:
            raise Unavailable("the stream is not open")
        while lane.inbox is None:
            if not lane.alive:
                raise Unavailable("the stream broke")
            self._waits_for = lane
            yield
            if in_turns and self._has_sign:
                self._has_sign = False
                return None
        value, lane.inbox = lane.inbox, None
        if isinstance(value, PsError) and not isinstance(value, StorageFull):
            raise value
        return value

    def _sign_of_life(self, push: SentPush) -> None:
        """The shard that is waited for says that it waits, too, if it can."""
        if push.sequence != self._sequence or not self._taking_turns:
            return
        self._scheduler.after(_SIGN_SECONDS, self.process, self._sign_of_life, push)
        lane = self._waits_for
        if lane is None or lane.stream is None:
            return
        shard, now = lane.stream.shard.process, self._scheduler.now
        reached = self.shared.network.heals(self.process.name, shard.name) <= now
        if shard.alive and shard.stopped_until <= now and reached:
            self._has_sign = True
            self._continue(None)

    def _reach(self, shard: SimShard) -> Steps:
        """Connect. Raises Unavailable."""
        network, scheduler = self.shared.network, self._scheduler
        if network.heals(self.process.name, shard.process.name) > scheduler.now:
            yield from self._sleep(1.0)
            raise Unavailable("cannot be reached")
        if not shard.process.alive:
            yield from self._sleep(network.delay())
            raise Unavailable("connection refused")

    def _shard(self, lane: SimLane) -> Steps:
        while True:
            shard = self.shared.shards_by_address[self._member_of(lane.shard).address]
            if shard.process.alive:
                return shard
            yield from self._sleep(_PERSIST_SECONDS)

    def _member_of(self, shard: int) -> Member:
        view = self._membership.view
        if view is not self._seen:
            self._seen = view
            self._shards.update(view.shards)
        if shard not in self._shards:
            raise Unavailable(f"shard {shard} is not there")
        return self._shards[shard]

    def _persist_with(self, lane: SimLane, shard: SimShard, handler: Callable[..., None], *asked: Any) -> Steps:
        """Call the shard of ``lane``, wherever it is by then."""
        name = handler.__name__
        while True:
            try:
                return (yield from self._call(shard.process, getattr(shard, name), *asked))
            except (Unavailable, NotReady):
                yield from self._sleep(_PERSIST_SECONDS)
                shard = yield from self._shard(lane)

    def _persist(self, server: Process, handler: Callable[..., None], *asked: Any) -> Steps:
        while True:
            try:
                return (yield from self._call(server, handler, *asked))
            except (Unavailable, NotReady):
                yield from self._sleep(_PERSIST_SECONDS)

    def _call(self, server: Process, handler: Callable[..., None], *asked: Any) -> Steps:
        self._ticket += 1
        self.shared.network.call(self.process, server, handler, partial(self._resume, self._ticket), *asked)
        value = yield
        if isinstance(value, PsError):
            raise value
        return value

    def _sleep(self, seconds: float) -> Steps:
        self._ticket += 1
        self._scheduler.after(seconds, self.process, self._resume, self._ticket, None)
        yield

    def _resume(self, ticket: int, value: Any) -> None:
        if ticket == self._ticket and self._waits_for is None:
            self._continue(value)

    def _wake(self) -> None:
        self._continue(None)

    def _continue(self, value: Any) -> None:
        self._waits_for = None
        self._ticket += 1
        if self._ended:
            return
        try:
            self._generator.send(value)
        except StopIteration:
            pass


@dataclass(slots=True)
class _DataShare:
    """The lease on data that a worker holds."""

    sequence: int = 0
    span: Span | None = None
    left: int = 0
    finished: bool = False


def _open_at_shard(stream: Stream, *asked: Any) -> None:
    stream.shard.open(stream, *asked)


def _push_at_shard(stream: Stream, *asked: Any) -> None:
    stream.shard.push(stream, *asked)


def _arrive_at_shard(stream: Stream, phase: int) -> None:
    stream.shard.arrive(stream, phase)
