"""One model's steps on all its shards, with one sequence and position, through outages and moves of slices."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from ps_protocol import times
from ps_protocol.cluster.answers import Outcome
from ps_protocol.cluster.view import ClusterView
from ps_protocol.errors import ModelMoved, ModelReleased, NotReady, Retryable, StateLost, StorageFull, Unavailable
from ps_protocol.logs import EventLogger
from ps_protocol.model.layout import Range
from ps_protocol.model.spec import Mode, ShardMap
from ps_protocol.retry import SHARD, Attempts
from ps_protocol.tracing.tracer import Attributes
from ps_protocol.wire.formats import RAW
from ps_protocol.wire.shared_memory import KeptMappings
from ps_worker.host.messages import FOREVER
from ps_worker.memory.flat import FlatModel
from ps_worker.memory.plan import FlatPlan
from ps_worker.model.optimizer_state import StateByNumber, join_state, split_state
from ps_worker.model.unused_options import UnusedOptions
from ps_worker.session.reporting import WaitReason
from ps_worker.session.session import Session
from ps_worker.step.first_values import FirstValues
from ps_worker.step.gradients import Gradients
from ps_worker.step.host_exchange import HostExchange
from ps_worker.step.shard_stream import ShardStream
from ps_worker.step.summary import PLAIN, StepPush, StepSettings, StepSummary, StreamPosition
from ps_worker.tables.lookup import Lookup, Position
from ps_worker.tables.row_payloads import InitialRows, RowRouter

logger = EventLogger("ps_worker")

T = TypeVar("T")

State = dict[int, dict[str, torch.Tensor]]
"""Tensors by number of the variable and name."""

_WAITED = attrgetter("waited_seconds")

_OTHERS = {mode: WaitReason.ROUND if mode.collects else WaitReason.BOUND for mode in Mode}
"""What a step of each mode waits for when it waits for other workers."""


class StepPipeline:
    """Called by one thread at a time, mostly the training thread.

    From any thread: ``interrupt``, ``interrupt_outdated``, ``resume`` and ``close``.

    A push has one sequence on all shards and is repeated with it after a broken stream, so it is applied once per
    shard. An exception other than a shard's own refusal drops the streams; the next call opens new ones.
    """

    def __init__(
        self,
        session: Session,
        shard_map: ShardMap,
        flat: FlatModel,
        gradients: Gradients,
        style: StepSettings = PLAIN,
        *,
        initial_rows: InitialRows = MappingProxyType({}),
        initial_state: StateByNumber = MappingProxyType({}),
        reconnect_timeout_seconds: float = times.PATIENCE_SECONDS,
        initial_timeout_seconds: float = times.LONG_PATIENCE_SECONDS,
    ) -> None:
        self.name = shard_map.spec.name
        self.reconnect_timeout_seconds = reconnect_timeout_seconds
        #: The model had been trained before this worker came.
        self.joined_running = False
        self._session, self._counters = session, session.counters
        self._flat = flat
        self._gradients = gradients
        self._style = style
        self._first_values = FirstValues(session, flat, initial_rows, initial_state, initial_timeout_seconds)
        self._options_lost = UnusedOptions(session.rank, shard_map.spec)
        self._moved: Callable[[FlatPlan], None] = lambda plan: None
        self._owner = os.getpid()
        self._sequence = 0
        self._interrupted = False
        #: What was mapped when slices moved, until the next exchange has ended.
        self._kept_memory = KeptMappings()
        self.shard_map = shard_map
        #: Called once at the end, where others of this host know of this model.
        self._ends_on_host: list[Callable[[], None]] = []
        #: Makes exchanges with the other workers of this host; None: they are made by this worker alone.
        self._host = self._host_exchange(flat, gradients, style)
        self._router = RowRouter(shard_map)
        #: One to each shard that has anything of the model.
        self.streams = self._new_streams()
        self._shards = [stream.shard for stream in self.streams]
        #: Answers are received into the model's memory, without a place between.
        self._is_direct = style.wire == RAW and not style.overlap
        #: What steps wait for when they wait for other workers, by the mode that was last looked at.
        self._others = WaitReason.BOUND
        #: (phase, clock): where this worker stands after its last push.
        self.position: Position = (session.phase, 0)
        #: The cluster's view that all streams were last looked at under; None: not since there are others.
        self._seen: ClusterView | None = None
        #: Every shard has values; one that opens without them has lost its state.
        self.started = False
        session.on_shards(self.interrupt_outdated)

    @property
    def version(self) -> int:
        """The lowest version of the parameters here, over the shards."""
        return min(stream.version for stream in self.streams)

    @property
    def uploaded(self) -> bool:
        """Whether the first values of the model were this worker's."""
        return self._first_values.uploaded

    def start(self) -> None:
        """Open all streams, see that every shard has values, and take them into flat memory. Raises PsError."""
        try:
            self.following_moves(self._start)
        except BaseException:
            self._drop()
            raise
        self.started = True
        if self._host is not None:
            self._host.start(joined_running=self.joined_running)
        # Where one broke meanwhile, its shard does not know that this worker has the values.
        self.keep_open()
        self._report_transports()

    def _start(self) -> None:
        standings = self._enter()
        self.joined_running = any(standing.version > 0 for standing in standings)
        empty = [stream for stream, s in zip(self.streams, standings, strict=True) if not s.initialised]
        if self.joined_running:
            # Training begins when every shard has values. One may have got them after its stream was opened here.
            for stream in empty:
                if not self.persistently(stream, stream.values.initialised):
                    raise self._state_lost(stream)
            empty = []
        self._first_values.bring(empty, self._router, self.persistently)
        self._pull()

    def exchange(self, push: StepPush) -> StepSummary:
        """Push the gradients in memory to every shard, then receive the next parameters from every shard.

        Raises the errors of shards once all have answered; the step counts nevertheless. Raises Unavailable when a
        shard stayed away, StateLost when one came back without its parameters, Fenced when this worker lost its place.
        """
        session = self._session
        session.check()
        try:
            if session.view is not self._seen or not all(map(attrgetter("is_alive"), self.streams)):
                shard_map = self.shard_map
                self.following_moves(self.ensure_open)
                if shard_map is not self.shard_map:
                    push.staged = ()
            (phase, clock), now = self.position, session.phase
            push.phase, push.clock = self.position = (phase, clock + 1) if phase >= now else (now, 1)
            push.sequence = self._sequence = self._sequence + 1
            try:
                if self._host is None:
                    answers = self._answers(push)
                else:
                    answers = self._host.exchange(push, self.streams, self._answers)
            except ModelMoved as moved:
                self._lay_out(moved)
                again = replace(push, staged=())
                answers = self._to_moved(again) if self._host is None else self._host.alone(again, self._to_moved)
        except BaseException:
            self._drop()
            raise
        if self._kept_memory.kept:
            self._kept_memory.clear()
        return self._summary(push, answers)

    def may_stage(self) -> bool:
        """Whether parts of the next push may be sent ahead: not where whole exchanges run beside the computation."""
        return self._host is None and self._session.lookahead == 0 and not any(s.is_pushing for s in self.streams)

    def stage(self, shard: int, span: Range) -> bool:
        """Send a part of the next push to ``shard`` ahead, where its stream is open; whether that was possible."""
        return any(stream.stage(span) for stream in self.streams if stream.shard == shard)

    def _answers(self, push: StepPush, *, is_sent: bool = False) -> list[StepSummary]:
        """Send ``push``; the answers, by shard. It is repeated on a new stream as often as one breaks.

        A shard that does not take the push of a host gets this worker's own at once: others may wait there for that,
        and the other shards for them. No other shard gets it: one that was restarted may have forgotten a push that has
        changed nothing.
        """
        answers: dict[int, StepSummary] = {}
        own: dict[int, StepPush] = {}
        if not is_sent:
            for stream in self.streams:
                if not stream.is_dropped:
                    stream.send(push)

        def receive(stream: ShardStream) -> bool:
            sent = own.get(stream.shard, push)
            if stream.is_dropped:
                self._repeat(stream, sent)
            answer = stream.receive()
            if answer is None:
                return False
            for error in answer.errors:
                if isinstance(error, ModelMoved):
                    raise error
                if isinstance(error, StorageFull):
                    # The shard lives and reports what it waits for: this worker waits as long as that takes.
                    self._pause_for_room(error)
                    stream.send(sent)
                    return False
            if sent.apart is not None and answer.outcome >= Outcome.REFUSED:
                own[stream.shard] = sent.apart()
                stream.send(own[stream.shard])
                return False
            answers[stream.shard] = answer
            return True

        counters, began = self._counters, time.perf_counter()
        reconnecting = counters.waits[WaitReason.RECONNECT]
        self._in_turns(receive, (push.phase, push.clock))
        found = list(map(answers.__getitem__, self._shards))
        counters.answered(
            time.perf_counter() - began,
            max(map(_WAITED, found)),
            counters.waits[WaitReason.RECONNECT] - reconnecting,
            self._others,
        )
        return found

    def _to_moved(self, push: StepPush) -> list[StepSummary]:
        """As ``_push_again``, through further moves."""
        return self.following_moves(partial(self._push_again, push))

    def _push_again(self, push: StepPush) -> list[StepSummary]:
        """Push to shards of another layout: all have ``push`` already, or none has."""
        for stream in self.streams:
            if stream.is_dropped:
                self.persistently(stream, partial(self._repeat, stream, push))
        return self._answers(push, is_sent=True)

    def _repeat(self, stream: ShardStream, push: StepPush) -> None:
        """Send ``push`` on a new stream; without its gradients where the shard has them already."""
        begin_ns = time.monotonic_ns()
        standing = self._open(stream, (push.phase, push.clock - 1))
        if push.trace is not None:
            said: Attributes = {"shard": stream.shard, "reason": "reconnect"}
            push.trace.part("wait", begin_ns, time.monotonic_ns(), said)
        stream.send(replace(push, skipped=True) if standing.last_sequence >= push.sequence else push)
        self._report_transports()

    def _pause_for_room(self, error: StorageFull) -> None:
        self._check_wait(error)
        self._session.wait_hint(f"waiting: {error.message}; {error.remedy}")
        time.sleep(0.5)

    def _summary(self, push: StepPush, answers: list[StepSummary]) -> StepSummary:
        """All ``answers`` to ``push`` together. Raises the first of their errors, with notes of the others."""
        summary = answers[0] if len(answers) == 1 else _joined(answers)
        self.position = max(self.position, (push.phase, summary.clock))
        if self.shard_map.spec.tables:
            self._leave_lower(push.phase, answers)
        if errors := summary.errors:
            for other in errors[1:]:
                errors[0].add_note(f"and from another shard: {other}")
            raise errors[0]
        if summary.clock != self.position[1]:
            summary = replace(summary, clock=self.position[1])
        self._session.instruments.version = min(summary.versions)
        self._session.record_step(None, summary.staleness, summary.transferred_bytes, summary.clock)
        return summary

    def _leave_lower(self, phase: int, answers: list[StepSummary]) -> None:
        """End the streams of shards that have this worker at a lower position; the next open gives them the right one.

        That happens where another shard found the push too late, or a shard refused it. Rows for the next push come
        before it, and would wait on such a shard for a position that only that push brings.
        """
        for stream, answer in zip(self.streams, answers, strict=True):
            if (phase, answer.clock) < self.position or answer.outcome is Outcome.REFUSED:
                stream.drop()

    # -- rows of tables

    @property
    def next_position(self) -> Position:
        """Of the next push."""
        phase, clock = max(self.position, (self._session.phase, 0))
        return phase, clock + 1

    def look_up(self, lookup: Lookup) -> None:
        """Ask for rows, of every shard whose stream is open; the others are asked when the rows are waited for."""
        lookup.asked_ns = time.monotonic_ns()
        lookup.lay_out(self._router)
        for stream in self.streams:
            if stream.is_open and stream.shard in lookup.parts:
                stream.look_up(lookup.parts[stream.shard], lookup.position, now=lookup.now)

    def finish(self, lookup: Lookup) -> None:
        """Wait until all rows are in place; those lost with a stream, or moved, are asked for again. Raises PsError.

        Where the mode has changed so that rows cannot come before the next push, they are those for it.
        """
        if lookup.arrived:
            lookup.finish()
            return
        self._session.check()
        begin_ns = time.monotonic_ns()
        try:
            self.following_moves(partial(self._receive_rows, lookup))
        except BaseException:
            self._drop()
            raise
        arrived_ns = time.monotonic_ns()
        lookup.finish()
        self._trace_lookup(lookup, begin_ns, arrived_ns)

    def _trace_lookup(self, lookup: Lookup, begin_ns: int, arrived_ns: int) -> None:
        """Record a lookup that was waited for from ``begin_ns`` on."""
        tracer = self._session.instruments.tracer
        if tracer is not None:
            asked_ns = lookup.asked_ns or begin_ns
            said: Attributes = {"model": self.name, "rank": self._session.rank, "rows": lookup.rows}
            span = tracer.begin("lookup", f"rows of model {self.name}", asked_ns, said)
            span.part("wait", begin_ns, arrived_ns)
            span.part("place", arrived_ns, end_ns := time.monotonic_ns())
            span.end(end_ns)

    def _receive_rows(self, lookup: Lookup) -> None:
        self._check_newest()
        lookup.lay_out(self._router)
        # Shards without a part take turns, too: one that was restarted makes others wait for this worker's position.
        self._in_turns(partial(self._has_rows, lookup), self.position)
        for part in lookup.parts.values():
            if isinstance(part.error, ModelMoved):
                raise part.error

    def _has_rows(self, lookup: Lookup, stream: ShardStream) -> bool:
        """Whether the part of ``stream`` has come, having asked for it; False: the shard waits."""
        if stream.shard not in lookup.parts:
            return True
        part, position = lookup.parts[stream.shard], self.next_position
        if not part.arrived and not stream.is_open:
            self._open(stream)
            self._report_transports()
        if not part.arrived and not stream.has_asked(part):
            stream.look_up(part, position, now=lookup.now)
        while not part.arrived:
            if not stream.receive_rows():
                # Perhaps for a worker of this host, which would wait for a push of this one there.
                phase, clock = position
                self.away((phase, clock + 1))
                if lookup.position > position and not self._session.lookahead:
                    # They would come after a push that is not made before they are there.
                    stream.drop()
                return False
        return True

    # -- barriers, values, state

    def arrive(self, phase: int) -> None:
        """Report to every shard that this worker enters the barrier that ends ``phase``: none waits for its steps then.

        Arrivals are not acknowledged. Call it again while waiting: it opens streams that have broken meanwhile.
        """
        self.keep_open()
        self.away((phase + 1, 0))
        for stream in self.streams:
            stream.arrive(phase)

    def away(self, until: Position) -> None:
        """No other worker of this host waits for a push of this one before ``until``."""
        if self._host is not None:
            self._host.away(until)

    def is_back(self) -> None:
        """The next push comes without a wait for others."""
        self.away(self.next_position)

    def pull(self) -> None:
        """The newest parameters and buffers of every shard into the model, whatever the mode. Raises PsError."""
        self.following_moves(self._pull)

    def _pull(self) -> None:
        for stream in self.streams:
            self.persistently(stream, stream.pull)
        self._flat.publish_parameters(self.position)
        self._flat.publish_buffers()
        self._session.instruments.version = self.version

    def publish(self) -> None:
        """Make the parameters that exchanges have brought the model's."""
        if not self._is_direct:
            for stream in self.streams:
                stream.land()
        self._flat.publish_parameters(self.position)

    def save_state(self, variable: int | None = None) -> State:
        """The optimizer state from all shards, or that of one variable by number. Raises PsError."""
        found = self.on_each(lambda stream: (stream.layout, stream.values.save_state(variable)))
        return join_state([layout for layout, _ in found], [entries for _, entries in found])

    def load_state(self, state: StateByNumber) -> None:
        """Replace the optimizer state of every shard. Raises PsError."""
        self.on_each(lambda stream: stream.values.load_state(split_state(stream.layout, state)))

    def _host_exchange(self, flat: FlatModel, gradients: Gradients, style: StepSettings) -> HostExchange | None:
        folder = self._session.host
        if folder is None:
            return None
        if not gradients.on_host:
            folder.away(FOREVER)
            folder.models += 1
            self._ends_on_host.append(folder.end_model)
            return None
        return HostExchange(self._session, folder, flat, gradients, self.shard_map.spec, style, self._keep_streams)

    # -- streams

    def _new_streams(self) -> list[ShardStream]:
        given = self._flat, self._gradients, self._style, self._options_lost, self._kept_memory
        return [ShardStream(self._session, self._router, shard, *given) for shard in self._flat.plan.holders]

    def _enter(self) -> list[StreamPosition]:
        """Open all streams for the first time: where this worker stands on each shard, and what it finds there.

        Shards may admit a newcomer at different positions. A shard with a lower one than another is opened again at the
        highest: it would wait for pushes that this worker never makes, and so would the rows that come before a push.
        """
        found = [self._open_first(stream) for stream in self.streams]
        for number, stream in enumerate(self.streams):
            if found[number].position < self.position:
                found[number] = self.persistently(stream, partial(self._open, stream, self.position))
        return found

    def keep_open(self) -> None:
        """Open streams that have ended, between two steps: a shard that was started again hears where this worker is.

        Raises PsError.
        """
        self.following_moves(self.ensure_open)

    def ensure_open(self) -> None:
        """Open the streams that are not open. Raises ModelMoved, PsError."""
        seen = self._session.view
        self._check_newest()
        for stream in self.streams:
            if not stream.is_open:
                self._open_first(stream)
                self._report_transports()
        self._seen, self._others = seen, _OTHERS[self._session.consistency.mode]

    def _open_first(self, stream: ShardStream) -> StreamPosition:
        """Open ``stream`` while no push is under way; the worker goes on from the highest position of any shard."""
        standing = self.persistently(stream, lambda: self._open(stream))
        self.position = max(self.position, standing.position)
        return standing

    def _open(self, stream: ShardStream, position: Position | None = None) -> StreamPosition:
        """Open ``stream`` again. ``position``: this worker's on that shard, if it is not that of the last push."""
        passed, began = self._session.phase, time.perf_counter()
        # Shards may be in a later phase than this worker has passed barriers: of a checkpoint made in a barrier.
        phase, clock = max(position or self.position, (passed, 0))
        try:
            standing = stream.open(phase, clock) if self.started or position else stream.open(passed)
        finally:
            if self.started:
                self._session.counters.waits[WaitReason.RECONNECT] += time.perf_counter() - began
        self._session.counters.reconnects += self.started
        if self.started and not standing.initialised:
            stream.drop()
            raise self._state_lost(stream)
        return standing

    def _state_lost(self, stream: ShardStream) -> StateLost:
        """The error for a shard that has lost the model's values."""
        return StateLost(
            f"{stream.peer} came back without the parameters of model '{self.name}'",
            shard=str(stream.shard),
            remedy="start the job again from a checkpoint; with --data-dir ps-server keeps its state",
        )

    def _report_transports(self) -> None:
        """Report the transport of each stream to the session."""
        self._session.record_transport({stream.shard: stream.transport for stream in self.streams if stream.transport})

    def _drop(self) -> None:
        """End all streams now."""
        self._kept_memory.clear()
        for stream in self.streams:
            stream.drop()

    def close(self) -> None:
        """End all streams. Safe to repeat; does nothing in a forked child."""
        if os.getpid() == self._owner:
            self._session.forget(self.interrupt_outdated)
            if self._host is not None:
                self._host.close()
            while self._ends_on_host:
                self._ends_on_host.pop()()
            self._drop()

    # -- outages

    def persistently(self, stream: ShardStream, action: Callable[[], T]) -> T:
        """The result of ``action``, which may be repeated until the shard answers, up to the reconnect timeout."""
        attempts: Attempts | None = None
        while True:
            self._session.check()
            try:
                return action()
            except Retryable as error:
                attempts = attempts or Attempts(SHARD.within(self.reconnect_timeout_seconds))
                self._wait(stream, attempts, error)

    def on_each(self, action: Callable[[ShardStream], T]) -> list[T]:
        """The result of ``action``, which may be repeated, for each shard. Raises PsError."""
        return self.following_moves(
            lambda: [self.persistently(stream, partial(action, stream)) for stream in self.streams]
        )

    def _in_turns(
        self,
        receive: Callable[[ShardStream], bool],
        position: Position,
    ) -> None:
        """Call ``receive`` until it has returned True for each stream; False: the shard waits.

        A shard that waits or cannot be reached goes to the end. A broken stream, or a refusal for want of room, is
        therefore noticed although another shard waits, perhaps for a worker that waits for this one. A shard that was
        restarted after its answer gets ``position`` again: it may have lost it and make others wait.
        """
        attempts: dict[int, Attempts] = {}
        turns = deque(self.streams)
        while turns:
            stream = turns.popleft()
            was_open = not stream.is_dropped
            try:
                if receive(stream):
                    continue
            except Retryable as error:
                if stream.shard not in attempts or stream.age_seconds > self.reconnect_timeout_seconds:
                    attempts[stream.shard] = Attempts(SHARD.within(self.reconnect_timeout_seconds))
                self._wait(stream, attempts[stream.shard], error)
                if was_open:
                    turns.appendleft(stream)
                    continue
            turns.append(stream)
            self._reopen([other for other in self.streams if other not in turns], position)

    def _reopen(self, done: list[ShardStream], position: Position) -> None:
        """Open streams that have ended since their shards answered; a shard that is away is left for later."""
        for stream in done:
            if not stream.is_open:
                try:
                    self._open(stream, position)
                except Retryable:
                    stream.drop()

    def _wait(self, stream: ShardStream, attempts: Attempts, error: Retryable) -> None:
        stream.drop()
        self._check_wait(error)
        self._check_newest()
        advancing = isinstance(error, NotReady) and error.progress
        ending = "waiting for it" if advancing else f"trying again for {attempts.left_seconds:.0f} s"
        self._session.wait_hint(f"{error.message}; {ending}")
        began = time.perf_counter()
        try:
            attempts.sleep_after(error)
        finally:
            self._session.counters.waits[WaitReason.RECONNECT] += time.perf_counter() - began

    def _check_wait(self, error: Retryable) -> None:
        """Raises ``error`` where waiting was interrupted, and Fenced."""
        if self._interrupted:
            raise error
        self._session.check()

    def _keep_streams(self, position: Position) -> None:
        """Open streams that have ended while this worker waits for others of its host, at ``position``.

        A shard that was started again may have forgotten where this worker stands, and so may those that slices have
        moved to: others wait for it there. Raises Unavailable where waiting was interrupted, ModelMoved, and PsError.
        """
        self._check_wait(Unavailable("waiting for the other workers of this host was interrupted"))
        self._check_newest()
        self._reopen(self.streams, position)

    def interrupt(self) -> None:
        """From another thread: a call that waits for a shard raises a Retryable error, until ``resume``."""
        self._interrupted = True
        for stream in self.streams:
            stream.interrupt()

    def interrupt_outdated(self) -> None:
        """From any thread, when shards may have been replaced: calls that wait for a replaced one go on with the next.

        A replaced process may be frozen or cut off, and would neither answer nor end its stream.
        """
        for stream in self.streams:
            if stream.is_outdated:
                stream.interrupt()

    def resume(self) -> None:
        """Waiting is possible again."""
        self._interrupted = False

    # -- slices that move between shards

    def on_moved(self, callback: Callable[[FlatPlan], None]) -> None:
        """Call ``callback`` with the new plan when slices have moved, from the thread that makes the exchange."""
        self._moved = callback

    def _check_newest(self) -> None:
        """Raises ModelMoved when there is a newer shard map: a shard that is waited for may be gone for good."""
        if self._session.epoch(self.name) > self.shard_map.epoch:
            raise ModelMoved(f"slices of model '{self.name}' have moved")

    def following_moves(self, action: Callable[[], T]) -> T:
        """The result of ``action``, which is repeated after slices have moved."""
        while True:
            try:
                return action()
            except ModelMoved as moved:
                self._lay_out(moved)

    def _lay_out(self, moved: ModelMoved) -> None:
        """Take the shard map in force. Parameters, and the gradients collected last, keep their values."""
        shard_map = newer_map(self._session, self.shard_map, moved, self.reconnect_timeout_seconds)
        versions = {stream.shard: stream.version for stream in self.streams}
        answered = min(stream.answered for stream in self.streams)
        self._kept_memory.clear()
        for stream in self.streams:
            if stream.is_pushing:
                stream.take_back()
            stream.drop(for_good=True)
        residuals = self.residuals()
        self.shard_map, self._router = shard_map, RowRouter(shard_map)
        self._flat.lay_out(shard_map)
        self._gradients.lay_out(self._flat.plan)
        self.streams, self._seen = self._new_streams(), None
        self._shards = [stream.shard for stream in self.streams]
        self.load_residuals(residuals)
        for stream in self.streams:
            stream.version = versions.get(stream.shard, min(versions.values()))
            stream.answered = answered
        self._moved(self._flat.plan)

    def residuals(self) -> State:
        """What the wire format has left out of gradients so far."""
        return join_state([stream.layout for stream in self.streams], [stream.residuals() for stream in self.streams])

    def load_residuals(self, residuals: Mapping[int, Mapping[str, Any]]) -> None:
        """Take over what an earlier process of this worker had left out."""
        for stream in self.streams:
            stream.load_residuals(split_state(stream.layout, residuals))


def newer_map(session: Session, known: ShardMap, moved: ModelMoved, timeout_seconds: float) -> ShardMap:
    """The first shard map after ``known``.

    Raises Unavailable when the coordinator does not give it in time, ModelReleased when that is of another model.
    """
    attempts = Attempts(SHARD.within(timeout_seconds))
    while (newer := session.shard_map(known.spec.name)).epoch <= known.epoch:
        session.check()
        attempts.sleep_after(moved)
    if newer.spec != known.spec or session.view.was_released(known.spec.name, known.epoch):
        raise ModelReleased(
            f"model '{known.spec.name}' was released, and another one has its name",
            remedy="use the new one: call cluster.optimizer(...) or cluster.follow(...) again",
        )
    logger.info("move", "model '%s': slices have moved to other shards", known.spec.name)
    return newer


def _joined(answers: list[StepSummary]) -> StepSummary:
    """The answers of several shards to one push."""
    return StepSummary(
        versions=tuple(version for answer in answers for version in answer.versions),
        outcomes=tuple(outcome for answer in answers for outcome in answer.outcomes),
        staleness=max(answer.staleness for answer in answers),
        clock=max(answer.clock for answer in answers),
        transferred_bytes=sum(answer.transferred_bytes for answer in answers),
        waited_seconds=max(answer.waited_seconds for answer in answers),
        errors=tuple(error for answer in answers for error in answer.errors),
    )
