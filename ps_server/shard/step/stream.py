"""The step stream of one worker and one model: reads pushes, and answers them in order under the consistency mode."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ps_protocol import times as shared
from ps_protocol.cluster.answers import Outcome, RowsAnswer, StepAnswer, WaitingAnswer
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
from ps_protocol.errors import InvalidRequest, NonFiniteGradient, PsError, StorageFull, TableFull
from ps_protocol.model.layout import Indexes, Layout, subtract
from ps_protocol.model.spec import NonFinite, Options
from ps_protocol.model.tables import RowOptions
from ps_protocol.tracing.tracer import Tracer
from ps_protocol.wire.codecs import PayloadCodec, Reference, payload_runs
from ps_protocol.wire.formats import RAW, Wire
from ps_protocol.wire.socket_messages import INLINE_BYTES
from ps_server.consistency import LIMIT, OUTCOMES, Position, PushInfo, Verdict, WorkerKey
from ps_server.optimizers.gradients import first_nonfinite
from ps_server.shard import times
from ps_server.shard.byte_budget import FREE_BYTES, ByteBudgets
from ps_server.shard.counters import Counters
from ps_server.shard.execution.executor import INLINE_WORK_BYTES
from ps_server.shard.step.model import ShardModel
from ps_server.shard.step.options import merge_options, merge_row_options
from ps_server.shard.step.published import Published, UnchangedSlices
from ps_server.shard.step.push import IncomingPush, combined_info, require_norm, require_weight
from ps_server.shard.step.push_trace import PushTracing, ServedPush
from ps_server.shard.step.pushed_rows import PushedRows, RequestedLookup, announced, wanted
from ps_server.shard.step.staging import Staging
from ps_server.shard.transport.base import AT_ONCE_BYTES, ServerTransport
from ps_server.state.region import Region
from ps_server.tasks import in_thread, run_together

logger = logging.getLogger(__name__)


PIPELINE_DEPTH = 4
"""Pushes of one stream that may be unanswered before the shard stops reading it."""


_CACHED_PATTERNS = 8

_MAX_PHASE = LIMIT - 1


@dataclass(frozen=True, slots=True)
class Fetched:
    """A worker asked for the newest parameters."""


@dataclass(frozen=True, slots=True)
class Unsent:
    """The transport has the rest of an answer that its socket did not take."""


#: An error ends the stream.
_Asked = IncomingPush | Fetched | RequestedLookup | Unsent | Exception


class StepStream:
    """One open stream, served by one handler: a task reads pushes, another writes their answers in order.

    A push up to 1 MB that waits for nothing takes no task: it is decided, applied and answered where its bytes are
    read. For its transport the stream is what deals with messages at once.
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
        a push that its worker has found finite is not checked again.
        """
        self._budgets = budgets or ByteBudgets.of()
        self._tracing = PushTracing(tracer, worker, model.name, model.layout.shard) if tracer else None
        self._transport = transport
        self._model = model
        self._worker = worker
        self._counters = counters
        self._quick = transport.kind is Transport.SHM
        self._codec = None if self._quick or wire == RAW else StreamCodec(wire, model.layout)
        differences = self._codec is not None and self._codec.keeps_error
        self._kept = UnchangedSlices(model.last_changes, keeps=keeps_slices, differences=differences)
        #: How many differences of options this worker has received.
        self._reported = 0
        #: Set while no reply reads a region.
        self._replied = asyncio.Event()
        self._replied.set()
        self._trusted = trusted
        self._traffic = counters.traffic[transport.kind]
        self._options: Sequence[Options] = model.layout.shard_map.spec.group_options
        self._row_options: Sequence[RowOptions] = [table.options for table in model.layout.shard_map.spec.tables]
        #: What has come of the next push; None: nothing.
        self._staging: Staging | None = None
        #: A push that is received at once; and of it: bytes in its message or behind it, and those that count in the
        #: budget of uploads until they have come.
        self._begun: IncomingPush | None = None
        self._begun_bytes = self._budgeted_bytes = 0
        #: Where there is a tracer: of the push that is received, its trace and when its header came.
        self._header_trace = "", 0
        #: One that the model has gathered, and that nobody answers yet.
        self._gathered: IncomingPush | None = None
        self._answers: asyncio.Queue[_Asked | None] = asyncio.Queue(PIPELINE_DEPTH)
        #: Handed to the writing task and not answered yet.
        self._unanswered = 0
        spec = model.layout.shard_map.spec
        #: A socket takes an answer whole, read or not; pushes may be dealt with at once, and without a look for NaN.
        self._is_small = model.layout.region_bytes <= INLINE_BYTES and self._codec is None
        self._is_at_once = model.layout.region_bytes <= AT_ONCE_BYTES and self._codec is None
        self._is_unchecked = spec.nonfinite is NonFinite.ALLOW
        self._clips = bool(spec.clip_grad_norm)

    async def run(self, other: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Serve until the worker sends its last, goes away, or what ``other`` begins ends. Raises PsError."""
        serving = run_together(self._read(), self._write(), until_all=True)
        try:
            await run_together(serving, self._model.stopped(), *([other()] if other else []))
        except ConnectionError as error:
            logger.debug("the stream of %s ended: %s", self._worker, error)
        finally:
            self._discard()
            self._drop_begun()
            if self._tracing is not None:
                self._tracing.close()

    # -- the reading task

    async def _read(self) -> None:
        while (message := await self._transport.receive(self)) is not None:
            await self._answer_gathered()  # before the message is
            asked = await self._take(message)
            if isinstance(asked, IncomingPush):
                await self._decide(asked)
                if self._is_small and not self._unanswered and self._newest_for(asked) is not None:
                    await self._answer_push(asked, waits=False)
                    asked = None
            if asked is not None:
                self._unanswered += 1
                await self._answers.put(asked)
            del message, asked  # no memory of it is kept until the next one comes
            # Others have their turn, also where a worker sends without a pause; and the writing task gives a region
            # that was read back before the next push is decided.
            await asyncio.sleep(0)
        await self._answer_gathered()
        await self._answers.put(None)

    async def _answer_gathered(self) -> None:
        """What was dealt with at once, and waits for an update, is answered by the writing task, where there is any."""
        if self._gathered is None:
            return
        self._model.decide_gathered()
        if (push := self._gathered) is not None:
            self._gathered = None
            if push.decision is not None:
                self._note(push)
            await self._answers.put(push if push.decision is not None else self._refused(push))

    def begin(self, message: StepRequest) -> Sequence[memoryview] | None:
        """See AtOnce. Pushes are decided and answered in one turn of the event loop, with those of other streams."""
        if type(message) is not PushHeader or not self._is_at_once or self._unanswered or self._staging is not None:
            return None
        if message.skipped or message.tables or message.staged:
            return None
        if self._tracing is not None:
            self._header_trace = message.traceparent, time.monotonic_ns()
        push, payload, model = self._begin(message), message.payload, self._model
        self._begun_bytes = len(payload)
        if message.segment:
            push.region, push.lent = self._transport.gradients(message.segment), True
            scatter(payload, ())
            self._begun = push
            return ()
        ranges = model.layout.ranges_without(push.absent, push.with_buffers)
        if payload:
            self._begun = push
            push.region = model.pool.take()
            scatter(payload, push.region.pieces(ranges))
            return ()
        self._begun_bytes = size = sum([end - begin for begin, end in ranges])
        if not size or model.copies.under_way:
            return None
        if size > FREE_BYTES:
            if not self._budgets.uploads.take_now(self._worker, size):
                return None
            self._budgeted_bytes = size
        self._begun = push
        push.region = model.pool.take()
        return push.region.pieces(ranges)

    def end(self) -> bool:
        """See AtOnce."""
        push = self._begun
        if self._budgeted_bytes:
            self._give_budget_back()
        if push is None:
            return False
        if (
            not (push.finite or self._is_unchecked)
            and push.region is not None
            and first_nonfinite(push.region.layout, push.region, push.absent) is not None
        ):
            return False  # what the policy says of it may have to be waited for
        if not self._model.gather(push, self._decided):
            return False
        self._begun, self._gathered = None, push
        self._unanswered += 1
        self._traffic.received += self._begun_bytes
        self._came(push)
        return True

    def _give_budget_back(self) -> None:
        size, self._budgeted_bytes = self._budgeted_bytes, 0
        self._budgets.uploads.give_back(self._worker, size)

    def _drop_begun(self) -> None:
        """The stream has ended before the push that is received was taken."""
        push, self._begun = self._begun, None
        if self._budgeted_bytes:
            self._give_budget_back()
        if push is not None:
            self._model.forget(push)

    def _decided(self, push: IncomingPush) -> None:
        """``push``, the only one without an answer, is decided: answer it, or leave that to the writing task."""
        if self._gathered is not push:
            return  # that has it already
        self._gathered = None
        left: IncomingPush | Unsent | Exception = push
        try:
            if push.decision is None:
                left = self._refused(push)
            else:
                self._note(push)
                if (newest := self._newest_for(push)) is not None:
                    if self._answer_at_once(push, newest):
                        self._unanswered -= 1
                        return
                    left = Unsent()
        except Exception as error:  # noqa: BLE001 -- it belongs to the stream
            left = error
        self._answers.put_nowait(left)

    def _refused(self, push: IncomingPush) -> IncomingPush | Exception:
        """What is to be answered to ``push``, about which nothing was decided; an error ends the stream."""
        if push.error is not None and not isinstance(push.error, InvalidRequest):
            return push.error
        if push.error is not None:
            self._refuse(push, push.error)
        return push

    async def _take(self, message: StepRequest) -> _Asked | None:
        """Receive what belongs to ``message``; returns what is to be answered."""
        match message:
            case PushHeader():
                return await self._read_push(message)
            case ArriveRequest(phase):
                self._arrive(phase)
            case StageRequest():
                await self._stage(message)
            case ReleaseRequest():
                self._transport.released()
            case FetchRequest():
                self._model.values.require()
                return Fetched()
            case LookupHeader():
                return await self._take_lookup(message)
            case _:
                raise InvalidRequest(
                    "not a message of an open step stream",
                    actual=type(message).__name__,
                    expected="push, lookup, stage, fetch, arrive or release",
                )
        return None

    def _arrive(self, phase: int) -> None:
        """Raises InvalidRequest for a phase after which there is no other, Fenced."""
        if phase >= _MAX_PHASE:
            raise InvalidRequest(
                "the phase of a barrier is out of range", expected=f"a phase below {_MAX_PHASE}", actual=str(phase)
            )
        self._model.arrive(self._worker, phase)

    async def _decide(self, push: IncomingPush) -> None:
        try:
            await self._model.push(push)
            self._note(push)
        except (NonFiniteGradient, InvalidRequest, StorageFull, TableFull) as error:
            self._refuse(push, error)

    def _note(self, push: IncomingPush) -> None:
        if (decision := push.decision) is None:
            return
        self._counters.staleness = decision.staleness
        if decision.verdict is Verdict.LATE or decision.verdict is Verdict.STALE:
            self._counters.dropped += 1

    def _refuse(self, push: IncomingPush, error: PsError) -> None:
        push.error = error
        self._counters.refused[self._model.name, error.code.name] += 1

    def _newest_for(self, push: IncomingPush) -> Published | None:
        """What the answer to ``push``, with no other before it, brings now; None: it has to wait."""
        if (decision := push.decision) is None or decision.verdict is Verdict.SEPARATE:
            return None
        if (newest := self._model.answerable()) is None:
            return None
        tracker, info = self._model.tracker, push.info
        position = info.lowest if info.others else info.position
        asked = tracker.pull_position(position, push.ahead) if push.ahead else position
        return newest if tracker.may_pull(asked) else None

    async def _read_push(self, header: PushHeader) -> IncomingPush:
        """The push of ``header``, received whole. Raises InvalidRequest, ConnectionError."""
        if (begun := self._begun) is not None:
            self._begun = None
            self._traffic.received += self._begun_bytes
            return self._came(begun)
        if self._tracing is not None:
            self._header_trace = header.traceparent, time.monotonic_ns()
        push = self._begin(header)
        rows = [push.rows.buffer] if push.rows and not header.rows_in_room else []
        if header.skipped:
            pass
        elif header.segment:
            push.region, push.lent = self._transport.gradients(header.segment), True
            await self._receive(header.payload, rows)
        else:
            ranges = self._model.layout.ranges_without(push.absent, header.with_buffers)
            if header.staged:
                ranges = subtract(ranges, self._staged().checked(header.staged))
            if self._model.copies.under_way or not self._replied.is_set():
                await self._one_region()
            region = self._staging.take() if self._staging else self._model.pool.take()
            try:
                if self._codec is None:
                    await self._receive(header.payload, region.pieces(ranges) + rows)
                else:
                    await self._decode(self._codec, region, push, header.payload, rows)
            except BaseException:
                # A push that does not come whole is dropped, and its memory is free again.
                self._model.pool.give(region)
                raise
            push.region = region
        if self._staging is not None:
            self._discard()
        return self._came(push)

    def _came(self, push: IncomingPush) -> IncomingPush:
        """``push`` has come whole."""
        self._counters.pushes += 1
        if self._tracing is not None and self._header_trace[0]:
            push.trace = self._tracing.begin(*self._header_trace)
        return push

    async def _stage(self, stage: StageRequest) -> None:
        """Receive a part of the next push. Raises InvalidRequest, ConnectionError."""
        if self._codec:
            raise InvalidRequest("a part of a push came ahead on a stream with a wire format", expected="whole pushes")
        await self._one_region()
        piece = self._staged().place(stage.begin, stage.end)
        await self._receive(stage.payload, [piece])

    def _discard(self) -> None:
        """Forget what has come of the next push."""
        if self._staging is not None:
            self._staging.discard()
            self._staging = None

    async def _receive(self, inline: bytes | memoryview, pieces: Sequence[memoryview]) -> None:
        """Fill ``pieces`` from a message or what follows it. Raises InvalidRequest, ConnectionError, Unavailable."""
        size = sum(map(len, pieces))
        if inline or not size:
            scatter(inline, pieces)
        elif size <= FREE_BYTES:
            await self._transport.receive_payload(pieces)
        else:
            # Held while bytes come, and not until the push is applied: that may wait for pushes of others.
            async with self._budgets.uploads.taken(self._worker, size):
                await self._transport.receive_payload(pieces)
        self._traffic.received += size

    def _staged(self) -> Staging:
        if self._staging is None:
            self._staging = Staging(self._model.layout, self._model.pool)
        return self._staging

    def _begin(self, header: PushHeader) -> IncomingPush:
        """Check one header. Raises InvalidRequest."""
        if header.sequence == 0:
            raise InvalidRequest("a push needs a sequence", expected="1 or more", actual="0")
        absent = frozenset(header.absent)
        if absent and max(absent) >= (slices := self._model.layout.parameter_slices):
            raise InvalidRequest(
                "an absent slice does not exist",
                shard=str(self._model.layout.shard),
                expected=f"indexes below {slices}",
                actual=str(max(absent)),
            )
        if header.weight or (header.contributions and not header.skipped):
            require_weight(header.weight, self._worker.rank)
        if self._clips and not header.skipped:
            require_norm(header.squared_norm, self._model.layout.shard_map.spec, self._worker.rank)
        if header.options:
            self._options = merge_options(self._model.layout.shard_map.spec, header.options)
        if header.table_options:
            self._row_options = merge_row_options(self._model.layout.shard_map.spec, header.table_options)
        position = Position(header.phase, header.clock)
        info = PushInfo(self._worker, header.sequence, position, header.pulled_version, header.skipped)
        if header.contributions:
            info = combined_info(info, header)
        push = IncomingPush(info, None, absent, self._options)
        # Assigned: as arguments by name they take a multiple of the time.
        push.with_buffers = header.with_buffers
        push.finite = header.finite and self._trusted
        push.weight = header.weight or 1.0
        push.squared_norm = header.squared_norm
        push.ahead = header.ahead
        if header.tables and not header.skipped:
            push.rows = self._announced(header)
        return push

    def _announced(self, header: PushHeader) -> PushedRows:
        """Memory for the rows of a push, or where they are already. Raises InvalidRequest."""
        tables, layout, options = header.tables, self._model.layout, self._row_options
        return announced(tables, layout, options, self._transport.pushed_rows if header.rows_in_room else None)

    async def _one_region(self) -> None:
        """Before memory is taken: wait until the last reply is sent, so that a stream needs one region at a time, and
        while the model itself takes one more than workers need.

        Not for long: a worker may send several pushes before it reads its replies.
        """
        if not self._replied.is_set():
            try:
                async with asyncio.timeout(times.REPLY_SECONDS):
                    await self._replied.wait()
            except TimeoutError:
                logger.debug("%s pushes before it has read the last reply", self._worker)
        if self._model.copies.under_way:
            await self._model.copies.ended()

    async def _decode(
        self, codec: StreamCodec, region: Region, push: IncomingPush, inline: bytes | memoryview, rows: list[memoryview]
    ) -> None:
        """Write the payload of a push in a wire format to ``region``."""
        encoded = codec.buffer(push.absent, buffers=push.with_buffers)
        await self._receive(inline, [encoded, *rows])
        await codec.decode(encoded, region, push.absent, buffers=push.with_buffers)

    async def _take_lookup(self, lookup: LookupHeader) -> RequestedLookup:
        """Take the ids of a lookup. Raises InvalidRequest, ConnectionError, StateLost."""
        self._model.values.require()
        asked = wanted(lookup.tables, self._model.layout)
        await self._receive(lookup.payload, [asked.buffer])
        if lookup.position is None:
            return RequestedLookup(lookup.number, asked, None)
        phase, clock = lookup.position
        if clock < 1:
            raise InvalidRequest(
                "a lookup does not name the push it is for", expected="a clock from 1", actual=str(clock)
            )
        return RequestedLookup(lookup.number, asked, Position(phase, clock - 1))

    # -- the writing task

    async def _write(self) -> None:
        while (asked := await self._answers.get()) is not None:
            if isinstance(asked, Fetched):
                await self._reply(StepAnswer(with_buffers=True))
                self._model.supplied.add(self._worker)
            elif isinstance(asked, RequestedLookup):
                await self._answer_lookup(asked)
            elif isinstance(asked, Unsent):
                await self._transport.send_rest()
            elif isinstance(asked, Exception):
                raise asked
            else:
                await self._answer_push(asked)
            self._unanswered -= 1
            del asked

    async def _answer_push(self, push: IncomingPush, *, waits: bool = True) -> None:
        """In the writing task, or the reading one while that has nothing to do. ``waits``: it may have to wait."""
        if push.decision is None or push.decision.verdict is Verdict.SEPARATE:
            await self._model.settled()
            refused = answer_to(push, self._model)
            await self._transport.send(refused)
            if push.trace is not None:
                push.trace.end(refused.outcome.name)
            return
        if push.trace is not None:
            push.trace.has_turn()
        waited_seconds, reason = 0.0, ""
        if waits:
            position = push.info.lowest if push.info.others else push.info.position
            waited_seconds, reason = await self._wait_for_mode(position, push.ahead)
        result = self._answer(push, waited_seconds, reason)
        await self._reply(result, push.info, push.trace)
        if push.trace is not None:
            push.trace.end(result.outcome.name)

    def _answer_at_once(self, push: IncomingPush, published: Published) -> bool:
        """Answer ``push``, which is decided, and made, from the live region; whether all of it is sent.

        Nothing changes the region meanwhile: its bytes are sent, or copied, before this returns.
        """
        began, model = time.perf_counter(), self._model
        number = model.last_changes.number
        if push.trace is not None:
            push.trace.has_turn()
        answer = self._answer(push, 0.0, "")
        self._complete(answer, published, push.info, push.trace)
        ranges = model.layout.ranges_without(answer.absent, answer.with_buffers)
        is_sent = self._transport.send_at_once(answer, published.region, ranges)
        self._traffic.sent += answer.payload_bytes
        self._kept.sent(number, raw=False)
        model.times.reply.observe(time.perf_counter() - began)
        if push.trace is not None:
            push.trace.end(answer.outcome.name)
        return is_sent

    def _answer(self, push: IncomingPush, waited_seconds: float, reason: str) -> StepAnswer:
        """What to answer to ``push``, for which the mode has made it wait so long and for this ``reason``."""
        result = answer_to(push, self._model)
        result.waited_seconds = waited_seconds
        if self._model.differences.known:
            found = self._model.differences.of(self._worker)
            result.differences = found[self._reported :]
            self._reported = len(found)
        if push.trace is not None:
            push.trace.may_go(reason)
            result.waited_for = reason
        return result

    def _complete(
        self, answer: StepAnswer, published: Published, info: PushInfo | None, trace: ServedPush | None
    ) -> None:
        """Add what follows from the version that ``answer`` brings."""
        if answer.sequence and self._model.failpoints.armed:
            self._model.failpoints.hit("after_apply_before_reply")
        answer.version = published.version
        if trace is not None:
            trace.sends()
        undone = self._model.undone
        if undone and info is not None and (error := undone.get((info.worker, info.sequence))) is not None:
            answer.outcome, answer.error = Outcome.SKIPPED, error
            self._counters.dropped += 1
        if answer.sequence and not (self._codec is not None and self._codec.needs_raw):
            answer.absent = self._kept.unchanged()

    async def _answer_lookup(self, asked: RequestedLookup) -> None:
        """Send the rows, or why there are none. Raises what stopped the model, ConnectionError."""
        if asked.position is not None:
            await self._wait_for_mode(asked.position)
        room = self._transport.room(asked.wanted.rows_bytes)
        # Not before the mode lets it be answered: a waiting worker would occupy memory that the others need.
        async with self._budgets.answers.taken(self._worker, 0 if room is not None else asked.wanted.rows_bytes):
            try:
                version, rows = await self._model.rows.look_up(asked.wanted, room, for_push=asked.position is not None)
            except InvalidRequest as error:
                await self._transport.send_payload(RowsAnswer(asked.number, error=error), [])
                return
            await self._transport.send_rows(RowsAnswer(asked.number, version), rows, in_room=room is not None)
        self._counters.traffic[self._transport.kind].sent += len(rows)

    def _blocker(self, position: Position, ahead: int) -> str | None:
        """What a pull at ``position`` waits for; None: nothing."""
        tracker = self._model.tracker
        return tracker.blocker(tracker.pull_position(position, ahead) if ahead else position)

    async def _wait_for_mode(self, position: Position, ahead: int = 0) -> tuple[float, str]:
        """Wait until a pull at ``position`` may be answered; sends a Waiting message now and then.

        Returns for how many seconds, and what it waited for first.
        """
        tracker, began, first = self._model.tracker, 0.0, ""
        # Asked again each time: the mode may have changed meanwhile.
        while reason := self._blocker(position, ahead):
            began, first = began or time.perf_counter(), first or reason
            try:
                async with asyncio.timeout(shared.HINT_SECONDS):
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
                raw = self._codec is not None and self._codec.needs_raw
                self._complete(answer, published, info, trace)
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
    """Send ``answer`` with the published parameters, and with buffers if it includes them."""
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
    answer = StepAnswer(info.sequence, Outcome.REFUSED, model.tracker.version, 0, info.position.clock)
    if decision is None:
        answer.error = push.error if isinstance(push.error, PsError) else None
        return answer
    answer.outcome = OUTCOMES[decision.verdict]
    answer.staleness = model.staleness.get(info.worker.rank, 0)
    if decision.verdict is Verdict.LATE:
        answer.clock = model.tracker.resume(info.position).clock
    return answer


def scatter(payload: bytes | memoryview, pieces: Sequence[memoryview]) -> None:
    """Write an inline payload to its places. Raises InvalidRequest when it is too short or too long."""
    expected = sum(map(len, pieces))
    if len(pieces) == 1 and len(payload) == expected:
        pieces[0][:] = payload
        return
    if len(payload) != expected:
        raise InvalidRequest(
            "an inline payload has the wrong size", expected=f"{expected} bytes", actual=f"{len(payload)} bytes"
        )
    at = 0
    for piece in pieces:
        piece[:] = payload[at : at + len(piece)]
        at += len(piece)


class StreamCodec:
    """Belongs to one stream, used by its reader and its writer, one of each at a time.

    Large payloads are worked on in threads, small ones at once. Formats that keep errors send parameters as differences
    to what the worker has; the first payload is raw.
    """

    def __init__(self, wire: Wire, layout: Layout) -> None:
        self._is_small = layout.region_bytes < INLINE_WORK_BYTES
        self._incoming = PayloadCodec(wire)
        self._reference = Reference(PayloadCodec(wire), layout)
        self._received = memoryview(bytearray())
        self._sent = memoryview(bytearray())
        #: By absent slices, and whether with buffers.
        self._runs = lru_cache(_CACHED_PATTERNS)(lambda absent, buffers: payload_runs(layout, absent, buffers=buffers))

    @property
    def keeps_error(self) -> bool:
        """Whether what a payload leaves out of a slice comes with later ones."""
        return self._reference.payload.keeps_error

    @property
    def needs_raw(self) -> bool:
        """Whether the next payload holds all bytes of the region, as they are."""
        return self._reference.needs_raw

    def buffer(self, absent: Indexes, *, buffers: bool) -> memoryview:
        """Where the payload of a push without the slices ``absent`` goes; valid until the next call."""
        size = self._incoming.encoded_bytes(self._runs(absent, buffers))
        if size > len(self._received):
            self._received = memoryview(bytearray(size))
        return self._received[:size]

    async def decode(self, data: memoryview, region: Region, absent: Indexes, *, buffers: bool) -> None:
        """Write what ``data`` stands for to ``region``. Raises InvalidRequest; nothing has been written then."""
        runs = self._runs(absent, buffers)
        await self._do(lambda: self._incoming.decode(data, runs, region.data))

    async def encode(self, absent: Indexes, region: Region, *, buffers: bool) -> memoryview | None:
        """The parameters without the slices ``absent``, valid until the next call; None: send the region's bytes."""
        if self._reference.needs_raw:
            await self._do(lambda: self._reference.reset(region.data))
            return None
        runs = self._runs(absent, buffers)
        size = self._reference.payload.encoded_bytes(runs)
        if size > len(self._sent):
            self._sent = memoryview(bytearray(size))
        data = self._sent[:size]
        await self._do(lambda: self._reference.encode(region.data, runs, data))
        return data

    async def _do(self, work: Callable[[], None]) -> None:
        if self._is_small:
            work()
        else:
            await in_thread(work)
