"""The step stream of one worker and one model: reads pushes, and answers them in order under the consistency mode."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from ps_protocol.cluster.answers import StepAnswer, WaitingAnswer
from ps_protocol.cluster.requests import (
    ArriveRequest,
    FetchRequest,
    LookupHeader,
    PushHeader,
    ReleaseRequest,
    StageRequest,
    StepRequest,
)
from ps_protocol.cluster.transport import Transport
from ps_protocol.errors import InvalidRequest, NonFiniteGradient, StorageFull, TableFull
from ps_protocol.tracing.tracer import Tracer
from ps_protocol.wire.formats import RAW, Wire
from ps_protocol.wire.socket_messages import INLINE_BYTES
from ps_server.consistency import LIMIT, OUTCOMES, Position, PushInfo, Verdict, WorkerKey
from ps_server.shard.byte_budget import ByteBudgets
from ps_server.shard.counters import Counters
from ps_server.shard.execution.tasks import run_together
from ps_server.shard.step.model import ShardModel
from ps_server.shard.step.published import Published, UnchangedSlices
from ps_server.shard.step.push import IncomingPush
from ps_server.shard.step.push_reader import PushReader, StreamCodec
from ps_server.shard.step.push_trace import PushTracing, ServedPush
from ps_server.shard.step.rows.lookups import StreamLookups
from ps_server.shard.step.rows.pushed_rows import RequestedLookup
from ps_server.shard.transport.base import ServerTransport

logger = logging.getLogger(__name__)

WAITING_SECONDS = 5.0
"""How often a parked pull sends a Waiting message."""

PIPELINE_DEPTH = 4
"""Pushes of one stream that may be unanswered before the shard stops reading it."""

_MAX_PHASE = LIMIT - 1


@dataclass(frozen=True, slots=True)
class Fetched:
    """A worker asked for the newest parameters."""


_Asked = IncomingPush | Fetched | RequestedLookup


class StepStream:
    """One open stream, served by one handler: a task reads pushes, another writes their answers in order.

    A small push that waits for nothing is answered by the reading task itself.
    """

    def __init__(
        self,
        transport: ServerTransport,
        model: ShardModel,
        worker: WorkerKey,
        counters: Counters,
        wire: Wire = RAW,
        *,
        keeps_slices: bool = False,
        budgets: ByteBudgets | None = None,
        tracer: Tracer | None = None,
        trusted: bool = True,
    ) -> None:
        """``wire`` is how payloads are written; raw where they are in memory that both sides map.

        ``keeps_slices``: the worker keeps what comes, so that only what has changed need come again. ``budgets``
        limit the bytes of rows and pushes on their way. ``tracer`` records the pushes that workers trace. ``trusted``:
        a push of which the worker says that it is finite is not looked at again.
        """
        budgets = budgets or ByteBudgets.of()
        self._tracing = PushTracing(tracer, worker, model.name, model.layout.shard) if tracer else None
        self._transport = transport
        self._model = model
        self._worker = worker
        self._counters = counters
        self._quick = transport.kind is Transport.SHM
        self._codec = None if self._quick or wire == RAW else StreamCodec(wire, model.layout)
        differences = self._codec is not None and self._codec.keeps_error
        self._kept = UnchangedSlices(model.last_changes, keeps=keeps_slices, differences=differences)
        #: How many differences of options this worker has been told of.
        self._told = 0
        #: Set while no reply reads a region.
        self._replied = asyncio.Event()
        self._replied.set()
        self._reader = PushReader(transport, model, worker, counters, self._codec, self._replied, budgets)
        self._reader.trusted = trusted
        self._lookups = StreamLookups(
            transport, model, worker, counters, self._reader, budgets.answers, self._wait_for_mode
        )
        self._answers: asyncio.Queue[_Asked | None] = asyncio.Queue(PIPELINE_DEPTH)
        #: Handed to the writing task and not answered yet.
        self._unanswered = 0
        self._is_small = model.layout.region_bytes <= INLINE_BYTES

    async def run(self, other: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Serve until the worker sends its last, goes away, or what ``other`` begins ends. Raises PsError."""
        serving = run_together(self._read(), self._write(), until_all=True)
        try:
            await run_together(serving, self._model.stopped(), *([other()] if other else []))
        except ConnectionError as error:
            logger.debug("the stream of %s ended: %s", self._worker, error)
        finally:
            self._reader.discard()
            if self._tracing is not None:
                self._tracing.close()

    # -- the reading task

    async def _read(self) -> None:
        while (message := await self._transport.receive()) is not None:
            asked = await self._take(message)
            if isinstance(asked, IncomingPush):
                await self._decide(asked)
                if self._is_prompt(asked):
                    await self._answer_push(asked, waits=False)
                    asked = None
            if asked is not None:
                self._unanswered += 1
                await self._answers.put(asked)
            del message, asked  # no memory of it is kept until the next one comes
        await self._answers.put(None)

    async def _take(self, message: StepRequest) -> _Asked | None:
        """Receive what belongs to ``message``; returns what is to be answered."""
        match message:
            case PushHeader():
                if self._tracing is not None and message.traceparent:
                    return await self._traced(self._tracing, message)
                return await self._reader.read(message)
            case ArriveRequest(phase):
                self._arrive(phase)
            case StageRequest():
                await self._reader.stage(message)
            case ReleaseRequest():
                self._transport.released()
                await asyncio.sleep(0)  # the writing task gives the region back before the next push is decided
            case FetchRequest():
                self._model.values.require()
                return Fetched()
            case LookupHeader():
                return await self._lookups.take(message)
            case _:
                raise InvalidRequest(
                    "not a message of an open step stream",
                    actual=type(message).__name__,
                    expected="push, lookup, stage, fetch, arrive or release",
                )
        return None

    async def _traced(self, tracing: PushTracing, header: PushHeader) -> IncomingPush:
        begin_ns = time.monotonic_ns()
        push = await self._reader.read(header)
        push.trace = tracing.begin(header.traceparent, begin_ns)
        return push

    def _arrive(self, phase: int) -> None:
        """Raises InvalidRequest for a phase after which there is no other, Fenced."""
        if phase >= _MAX_PHASE:
            raise InvalidRequest(
                "the phase of a barrier is out of range", expected=f"a phase below {_MAX_PHASE}", actual=str(phase)
            )
        self._model.arrive(self._worker, phase)

    async def _decide(self, push: IncomingPush) -> None:
        try:
            decision = push.decision = await self._model.push(push)
        except (NonFiniteGradient, InvalidRequest, StorageFull, TableFull) as error:
            push.error = error
            self._counters.refused[self._model.name, error.code.name] += 1
            return
        self._counters.staleness = decision.staleness
        self._counters.dropped += decision.verdict in (Verdict.LATE, Verdict.STALE)

    def _is_prompt(self, push: IncomingPush) -> bool:
        """Whether the answer to ``push`` can be sent now, and is sent at once."""
        return (
            self._is_small
            and not self._unanswered
            and push.decision is not None
            and self._model.is_settled
            and self._blocker(push.info.position, push.ahead) is None
        )

    # -- the writing task

    async def _write(self) -> None:
        while (asked := await self._answers.get()) is not None:
            if isinstance(asked, Fetched):
                await self._reply(StepAnswer(with_buffers=True))
                self._model.supplied.add(self._worker)
            elif isinstance(asked, RequestedLookup):
                await self._lookups.answer(asked)
            else:
                await self._answer_push(asked)
            self._unanswered -= 1
            del asked

    async def _answer_push(self, push: IncomingPush, *, waits: bool = True) -> None:
        """In the writing task, or the reading one while that has nothing to do. ``waits``: it may have to wait."""
        if push.decision is None:
            await self._model.settled()
            refused = answer_to(push, self._model)
            await self._transport.send(refused)
            if push.trace is not None:
                push.trace.end(refused.outcome)
            return
        if push.trace is not None:
            push.trace.has_turn()
        waited_seconds, reason = await self._wait_for_mode(push.info.position, push.ahead) if waits else (0.0, "")
        result = self._with_differences(answer_to(push, self._model))
        result.waited_seconds = waited_seconds
        if push.trace is not None:
            push.trace.may_go(reason)
            result.waited_for = reason
        await self._reply(result, push.info, push.trace)
        if push.trace is not None:
            push.trace.end(result.outcome)

    def _blocker(self, position: Position, ahead: int) -> str | None:
        """What a pull at ``position`` waits for; None: nothing."""
        tracker = self._model.tracker
        return tracker.blocker(tracker.pull_position(position, ahead) if ahead else position)

    def _with_differences(self, answer: StepAnswer) -> StepAnswer:
        if self._model.differences.known:
            found = self._model.differences.of(self._worker)
            answer.differences = found[self._told :]
            self._told = len(found)
        return answer

    async def _wait_for_mode(self, position: Position, ahead: int = 0) -> tuple[float, str]:
        """Wait until a pull at ``position`` may be answered; sends a Waiting message now and then.

        Returns for how many seconds, and what it waited for first.
        """
        tracker, began, first = self._model.tracker, 0.0, ""
        # Asked again each time: the mode may have changed meanwhile.
        while reason := self._blocker(position, ahead):
            began, first = began or time.perf_counter(), first or reason
            try:
                async with asyncio.timeout(WAITING_SECONDS):
                    await self._model.may_pull(tracker.pull_position(position, ahead))
            except TimeoutError:
                await self._transport.send(WaitingAnswer(reason))
        if not began:
            return 0.0, ""
        seconds = time.perf_counter() - began
        self._model.times.wait.observe(seconds)
        return seconds, first

    async def _reply(self, answer: StepAnswer, info: PushInfo | None = None, trace: ServedPush | None = None) -> None:
        self._replied.clear()
        began = time.perf_counter()
        # Read first: what is published holds these changes at least.
        number = self._model.last_changes.number
        try:
            published = await self._model.take_published(quick=self._quick, trace=trace)
            try:
                if answer.sequence and self._model.failpoints.armed:
                    self._model.failpoints.hit("after_apply_before_reply")
                answer.version = published.version
                if trace is not None:
                    trace.sends()
                if info:
                    self._counters.dropped += tell_skipped(answer, info, self._model)
                raw = self._codec is not None and self._codec.needs_raw
                if answer.sequence and not raw:
                    answer.absent = self._kept.unchanged()
                await send_published(self._transport, answer, published, self._model, self._counters, self._codec)
            finally:
                published.give_back(quick=self._quick)
            self._kept.sent(number, raw=raw)
            self._model.times.reply.observe(time.perf_counter() - began)
        finally:
            self._replied.set()


async def send_published(
    transport: ServerTransport,
    answer: StepAnswer,
    published: Published,
    model: ShardModel,
    counters: Counters,
    codec: StreamCodec | None = None,
) -> None:
    """Send ``answer`` with the published parameters, and buffers where it says so."""
    absent, buffers = answer.absent, answer.with_buffers
    encoded = await codec.encode(absent, published.region, buffers=buffers) if codec else None
    if encoded is not None:
        answer.encoded = True
        await transport.send_payload(answer, [encoded])
    else:
        ranges = model.layout.ranges_without(absent, buffers)
        await transport.send_parameters(answer, published.region, ranges)
    counters.traffic[transport.kind].sent += answer.payload_bytes


def answer_to(push: IncomingPush, model: ShardModel) -> StepAnswer:
    """The answer to one push, without parameters."""
    info, decision = push.info, push.decision
    answer = StepAnswer(info.sequence, "REFUSED", model.tracker.version, clock=info.position.clock, error=push.error)
    if decision is None:
        return answer
    answer.outcome = OUTCOMES[decision.verdict]
    answer.staleness = model.staleness.get(info.worker.rank, 0)
    if decision.verdict is Verdict.LATE:
        answer.clock = model.tracker.resume(info.position).clock
    return answer


def tell_skipped(answer: StepAnswer, info: PushInfo, model: ShardModel) -> bool:
    """Say in ``answer`` that the step of this push raised, if it did; whether it did."""
    error = model.skipped(info)
    if error is not None:
        answer.outcome, answer.error = "SKIPPED", error
    return error is not None
