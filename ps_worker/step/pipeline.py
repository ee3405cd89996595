"""Carries one model's steps to all its shards: same sequence and position everywhere, and through broken streams."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from ps_protocol.errors import ModelMoved, StorageFull
from ps_protocol.model.layout import Range
from ps_protocol.model.spec import Mode, ShardMap
from ps_protocol.tracing.tracer import Attributes
from ps_worker.memory.flat import FlatModel
from ps_worker.model.optimizer_state import StateByNumber, join_state, split_state
from ps_worker.session.reporting import WaitReason
from ps_worker.session.session import Session
from ps_worker.step.alternating import Gradients
from ps_worker.step.first_values import INITIAL_TIMEOUT_SECONDS, FirstValues
from ps_worker.step.model_streams import ModelStreams, State
from ps_worker.step.shard_stream import ShardStream
from ps_worker.step.summary import PLAIN, Outcome, StepPush, StepSummary, Style
from ps_worker.tables.initial import InitialRows
from ps_worker.tables.lookup import Lookup, Position

T = TypeVar("T")

_OTHERS = {mode: WaitReason.ROUND if mode.collects else WaitReason.BOUND for mode in Mode}
"""What a step of each mode waits for when it waits for other workers."""

RECONNECT_TIMEOUT_SECONDS = 60.0
"""How long a shard may be away before a step gives up."""

_FULL_SECONDS = 0.5
"""Between two tries of a push that a shard has no room to log."""


class StepPipeline:
    """Called by one thread at a time, mostly the training thread; ``close`` from anywhere.

    A push has one sequence on all shards and is repeated with it after a broken stream, so it is applied once per
    shard. An exception other than a shard's own refusal drops the streams; the next call opens new ones.
    """

    def __init__(
        self,
        session: Session,
        shard_map: ShardMap,
        flat: FlatModel,
        gradients: Gradients,
        style: Style = PLAIN,
        *,
        initial_rows: InitialRows = MappingProxyType({}),
        initial_state: StateByNumber = MappingProxyType({}),
        reconnect_timeout_seconds: float = RECONNECT_TIMEOUT_SECONDS,
        initial_timeout_seconds: float = INITIAL_TIMEOUT_SECONDS,
    ) -> None:
        self.name = shard_map.spec.name
        self.reconnect_timeout_seconds = reconnect_timeout_seconds
        #: The model had been trained before this worker came.
        self.joined_running = False
        self._session, self._counters = session, session.counters
        self._flat = flat
        self._first_values = FirstValues(session, flat, initial_rows, initial_state, initial_timeout_seconds)
        #: The model's streams to its shards.
        self.streams = ModelStreams(session, shard_map, flat, gradients, style, reconnect_timeout_seconds)
        self._owner = os.getpid()
        self._sequence = 0

    @property
    def version(self) -> int:
        """The lowest version of the parameters held, over the shards."""
        return min(stream.version for stream in self.streams.all)

    @property
    def uploaded(self) -> bool:
        """Whether the first values of the model were this worker's."""
        return self._first_values.uploaded

    def start(self) -> None:
        """Open all streams, see that every shard has values, and take them into flat memory. Raises PsError."""
        try:
            self.streams.following_moves(self._start)
        except BaseException:
            self.streams.drop()
            raise
        self.streams.started = True
        # Where one broke meanwhile, its shard does not know that this worker has the values.
        self.streams.following_moves(self.streams.ensure_open)
        self.streams.report_transports()

    def _start(self) -> None:
        streams = self.streams
        standings = streams.enter()
        self.joined_running = any(standing.version > 0 for standing in standings)
        empty = [stream for stream, s in zip(streams.all, standings, strict=True) if not s.initialised]
        if self.joined_running:
            # Training begins when every shard has values. One may have got them after its stream was opened here.
            for stream in empty:
                if not streams.persistently(stream, stream.values.initialised):
                    raise streams.state_lost(stream)
            empty = []
        self._first_values.bring(empty, streams.router, streams.persistently)
        self._pull()

    def exchange(self, push: StepPush) -> StepSummary:
        """Push the gradients in memory to every shard, then receive the next parameters from every shard.

        Raises the errors of shards once all have answered; the step counts nevertheless. Raises Unavailable when a
        shard stayed away, StateLost when one came back without its parameters, Fenced when this worker lost its place.
        """
        self._session.check()
        streams = self.streams
        try:
            if not streams.are_ready():
                shard_map = streams.shard_map
                streams.following_moves(streams.ensure_open)
                if shard_map is not streams.shard_map:
                    push.staged = ()
            self._number(push)
            for stream in streams.all:
                stream.send(push)
            try:
                answers = self._answers(push)
            except ModelMoved as moved:
                streams.lay_out(moved)
                answers = streams.following_moves(partial(self._push_again, replace(push, staged=())))
        except BaseException:
            streams.drop()
            raise
        if streams.kept_memory.kept:
            streams.kept_memory.clear()
        return self._summary(push, answers)

    def may_stage(self) -> bool:
        """Whether parts of the next push may be sent ahead: not where whole exchanges run beside the computation."""
        return self._session.lookahead == 0 and not any(stream.is_pushing for stream in self.streams.all)

    def stage(self, shard: int, span: Range) -> bool:
        """Send a part of the next push to ``shard`` ahead, where its stream is open; whether that was possible."""
        return any(stream.stage(span) for stream in self.streams.all if stream.shard == shard)

    def _number(self, push: StepPush) -> None:
        push.phase, push.clock = self.streams.position = self.next_position
        push.sequence = self._sequence = self._sequence + 1

    def _answers(self, push: StepPush) -> list[StepSummary]:
        """The answers to ``push``, by shard; it is repeated on a new stream as often as one breaks."""
        answers: dict[int, StepSummary] = {}

        def receive(stream: ShardStream) -> bool:
            if stream.is_dropped:
                self._repeat(stream, push)
            answer = stream.receive()
            if answer is None:
                return False
            for error in answer.errors:
                if isinstance(error, ModelMoved):
                    raise error
                if isinstance(error, StorageFull):
                    # The shard lives and says what it waits for: so does this worker, for as long as that takes.
                    self._pause_for_room(error)
                    stream.send(push)
                    return False
            answers[stream.shard] = answer
            return True

        counters, began = self._counters, time.perf_counter()
        reconnecting = counters.waits[WaitReason.RECONNECT]
        self.streams.in_turns(self.streams.all, receive, (push.phase, push.clock))
        found = [answers[stream.shard] for stream in self.streams.all]
        counters.answered(
            time.perf_counter() - began,
            max([answer.waited_seconds for answer in found]),
            counters.waits[WaitReason.RECONNECT] - reconnecting,
            _OTHERS[self._session.consistency.mode],
        )
        return found

    def _push_again(self, push: StepPush) -> list[StepSummary]:
        """Push to shards of another layout: all have ``push`` already, or none has."""
        for stream in self.streams.all:
            if stream.is_dropped:
                self.streams.persistently(stream, partial(self._repeat, stream, push))
        return self._answers(push)

    def _repeat(self, stream: ShardStream, push: StepPush) -> None:
        """Send ``push`` on a new stream; without its gradients where the shard has them already."""
        begin_ns = time.monotonic_ns()
        standing = self.streams.open(stream, (push.phase, push.clock - 1))
        if push.trace is not None:
            said: Attributes = {"shard": stream.shard, "reason": "reconnect"}
            push.trace.part("wait", begin_ns, time.monotonic_ns(), said)
        stream.send(replace(push, skipped=True) if standing.last_sequence >= push.sequence else push)
        self.streams.report_transports()

    def _pause_for_room(self, error: StorageFull) -> None:
        self.streams.check_wait(error)
        self._session.wait_hint(f"waiting: {error.message}; {error.remedy}")
        time.sleep(_FULL_SECONDS)

    def _summary(self, push: StepPush, answers: list[StepSummary]) -> StepSummary:
        """All ``answers`` to ``push`` together. Raises the first of their errors, with notes of the others."""
        summary = answers[0] if len(answers) == 1 else _joined(answers)
        self.streams.position = max(self.streams.position, (push.phase, summary.clock))
        if self.streams.shard_map.spec.tables:
            self._leave_lower(push.phase, answers)
        if errors := summary.errors:
            for other in errors[1:]:
                errors[0].add_note(f"and from another shard: {other}")
            raise errors[0]
        if summary.clock != self.streams.position[1]:
            summary = replace(summary, clock=self.streams.position[1])
        self._session.instruments.version = min(summary.versions)
        self._session.record_step(None, summary.staleness, summary.transferred_bytes, summary.clock)
        return summary

    def _leave_lower(self, phase: int, answers: list[StepSummary]) -> None:
        """End the streams of shards that have this worker lower than it goes on from; they hear that at the next open.

        So it is where another shard found the push too late, or a shard refused it. Rows for the next push come before
        it, and would wait there for what only that push would say.
        """
        for stream, answer in zip(self.streams.all, answers, strict=True):
            if (phase, answer.clock) < self.streams.position or answer.outcome is Outcome.REFUSED:
                stream.drop()

    # -- rows of tables

    @property
    def next_position(self) -> Position:
        """Of the next push."""
        phase, clock = max(self.streams.position, (self._session.phase, 0))
        return phase, clock + 1

    def look_up(self, lookup: Lookup) -> None:
        """Ask for rows, of every shard whose stream is open; the others are asked when the rows are waited for."""
        lookup.asked_ns = time.monotonic_ns()
        lookup.lay_out(self.streams.router)
        for stream in self.streams.all:
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
            self.streams.following_moves(partial(self._receive_rows, lookup))
        except BaseException:
            self.streams.drop()
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
        self.streams.check_newest()
        lookup.lay_out(self.streams.router)
        # Shards without a part take turns, too: one that was restarted makes others wait for this worker's position.
        self.streams.in_turns(self.streams.all, partial(self._has_rows, lookup), self.streams.position)
        for part in lookup.parts.values():
            if isinstance(part.error, ModelMoved):
                raise part.error

    def _has_rows(self, lookup: Lookup, stream: ShardStream) -> bool:
        """Whether the part of ``stream`` has come, having asked for it; False: the shard waits."""
        if stream.shard not in lookup.parts:
            return True
        part, position = lookup.parts[stream.shard], self.next_position
        if not part.arrived and not stream.is_open:
            self.streams.open(stream)
            self.streams.report_transports()
        if not part.arrived and not stream.has_asked(part):
            stream.look_up(part, position, now=lookup.now)
        while not part.arrived:
            if not stream.receive_rows():
                if lookup.position > position and not self._session.lookahead:
                    # They would come after a push that is not made before they are there.
                    stream.drop()
                return False
        return True

    # -- barriers, values, state

    def arrive(self, phase: int) -> None:
        """Tell every shard that this worker enters the barrier that ends ``phase``: no shard waits for its steps then.

        Arrivals are not acknowledged. Call it again while waiting: it opens streams that have broken meanwhile.
        """
        self.streams.following_moves(self.streams.ensure_open)
        for stream in self.streams.all:
            stream.arrive(phase)

    def pull(self) -> None:
        """The newest parameters and buffers of every shard into the model, whatever the mode. Raises PsError."""
        self.streams.following_moves(self._pull)

    def _pull(self) -> None:
        for stream in self.streams.all:
            self.streams.persistently(stream, stream.pull)
        self._flat.publish_parameters(self.streams.position)
        self._flat.publish_buffers()
        self._session.instruments.version = self.version

    def publish(self) -> None:
        """Make the parameters that exchanges have brought the model's."""
        for stream in self.streams.all:
            stream.land()
        self._flat.publish_parameters(self.streams.position)

    def save_state(self, variable: int | None = None) -> State:
        """The optimizer state from all shards, or that of one variable by number. Raises PsError."""
        found = self.streams.on_each(lambda stream: (stream.layout, stream.values.save_state(variable)))
        return join_state([layout for layout, _ in found], [entries for _, entries in found])

    def load_state(self, state: StateByNumber) -> None:
        """Replace the optimizer state of every shard. Raises PsError."""
        self.streams.on_each(lambda stream: stream.values.load_state(split_state(stream.layout, state)))

    def close(self) -> None:
        """End all streams. Safe to repeat; does nothing in a forked child."""
        if os.getpid() == self._owner:
            self.streams.close()


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
