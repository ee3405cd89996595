"""The step stream of one worker and one model: reads pushes, and answers them in order under the consistency mode."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from ps_protocol.errors import InvalidRequest, NonFiniteGradient, PsError, StorageFull, TableFull, to_detail
from ps_protocol.frames import pieces_of
from ps_protocol.layout import Range, subtract
from ps_protocol.model import Options
from ps_protocol.tables import RowOptions
from ps_protocol.v1 import common_pb2
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire import RAW, Wire
from ps_server.consistency import LIMIT, Decision, Position, PushInfo, Verdict, WorkerKey
from ps_server.optimizers import Region
from ps_server.shard.budget import AnswerBudget
from ps_server.shard.carriers.carrier import Carrier, scatter
from ps_server.shard.coding import Coding
from ps_server.shard.counters import Counters
from ps_server.shard.kept import Kept
from ps_server.shard.model import Gradients, Push, ShardModel
from ps_server.shard.option_differences import difference_to_pb
from ps_server.shard.options import merge_options, merge_row_options
from ps_server.shard.published import Published
from ps_server.shard.pushed_rows import PushedRows, WantedRows, announced, wanted
from ps_server.shard.staging import Staging

logger = logging.getLogger(__name__)

WAITING_SECONDS = 5.0
"""How often a parked pull gives a sign of life."""

PIPELINE_DEPTH = 4
"""Pushes of one stream that may be unanswered before the shard stops reading it."""

_MAX_PHASE = LIMIT - 1

REPLY_SECONDS = 1.0
"""How long a push waits for the reply before it to be sent."""

OUTCOMES = {
    Verdict.APPLY: pb.OUTCOME_APPLIED,
    Verdict.HOLD: pb.OUTCOME_APPLIED,
    Verdict.DUPLICATE: pb.OUTCOME_DUPLICATE,
    Verdict.LATE: pb.OUTCOME_LATE,
    Verdict.STALE: pb.OUTCOME_STALE,
    Verdict.SKIP: pb.OUTCOME_SKIPPED,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What the writer still has to send for one push: the decision, or the error that refused it."""

    info: PushInfo
    push_only: bool
    decision: Decision | None = None
    #: Steps that the parameters are used later than usual.
    ahead: int = 0
    error: PsError | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """What the writer still has to send to a worker that asked for the newest parameters."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the writer still has to send to a worker that asked for rows."""

    number: int
    wanted: WantedRows
    #: Where the worker stands before the push that the rows are for; None: whatever the mode.
    position: Position | None


@dataclass(slots=True)
class Incoming:
    """A push whose header has come."""

    header: pb.PushHeader
    absent: frozenset[int]
    options: Sequence[Options]
    ranges: list[Range]
    rows: PushedRows | None


class StepStream:
    """One open stream, served by one handler: a task reads pushes, another writes their answers in order."""

    def __init__(
        self,
        carrier: Carrier,
        model: ShardModel,
        worker: WorkerKey,
        counters: Counters,
        wire: Wire = RAW,
        *,
        keeps_slices: bool = False,
        answers: AnswerBudget | None = None,
    ) -> None:
        """``wire`` is how payloads are written; raw where they lie in memory that both sides map.

        ``keeps_slices``: the worker keeps what comes, so that only what has changed need come again. ``answers``: what
        limits the memory of rows on their way; None: nothing does.
        """
        self._budget = answers or AnswerBudget()
        self._carrier = carrier
        self._model = model
        self._worker = worker
        self._counters = counters
        shared = carrier.transport == common_pb2.TRANSPORT_SHM
        self._coding = None if shared or wire == RAW else Coding(wire, model.layout)
        differences = self._coding is not None and self._coding.keeps_error
        self._kept = Kept(model.last_changes, keeps=keeps_slices, differences=differences)
        self._options: Sequence[Options] = model.layout.shard_map.spec.group_options
        self._row_options: Sequence[RowOptions] = [table.options for table in model.layout.shard_map.spec.tables]
        #: How many differences of options this worker has been told of.
        self._told = 0
        #: Set while no reply reads a region.
        self._replied = asyncio.Event()
        self._replied.set()
        self._staging = Staging(model.layout, model.pool)
        self._answers: asyncio.Queue[Answer | Fetched | Asked | None] = asyncio.Queue(PIPELINE_DEPTH)

    async def run(self, *others: Coroutine[Any, Any, None]) -> None:
        """Serve until the worker sends its last, goes away, or one of ``others`` ends. Raises PsError."""
        tasks = [asyncio.ensure_future(each) for each in (self._serve(), self._model.stopped(), *others)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            while done:
                done.pop().result()
        except ConnectionError as error:
            logger.debug("the stream of %s ended: %s", self._worker, error)
        finally:
            await _end(tasks)
            tasks.clear()
            self._staging.discard()

    async def push_once(self) -> pb.StepResult:
        """Read one push and decide it, without waiting for parameters. Raises PsError, ConnectionError."""
        try:
            while (message := await self._carrier.receive()) is not None:
                push = await self._take(message)
                if push is not None:
                    decision = await self._model.push(push)
                    await self._model.settled()
                    return settled_result(Answer(push.info, True, decision), self._model)
        finally:
            self._staging.discard()
        raise InvalidRequest("the stream ended before a whole push", expected="a push header and its payload")

    async def _serve(self) -> None:
        tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            while done:
                done.pop().result()
        finally:
            await _end(tasks)
            tasks.clear()

    async def _read(self) -> None:
        while (message := await self._carrier.receive()) is not None:
            push = await self._take(message)
            if push is not None:
                await self._answers.put(await self._decide(push))
        await self._answers.put(None)

    async def _take(self, message: pb.StepRequest) -> Push | None:
        match message.WhichOneof("body"):
            case "push":
                return await self._receive(self._begin(message.push))
            case "arrive":
                self._arrive(message.arrive.phase)
            case "stage":
                await self._stage(message.stage)
            case "release":
                self._carrier.released()
            case "fetch":
                self._model.require_values()
                await self._answers.put(Fetched())
            case "lookup":
                self._model.require_values()
                await self._answers.put(await self._asked(message.lookup))
            case other:
                raise InvalidRequest(
                    "not a message of an open step stream",
                    actual=str(other),
                    expected="push, lookup, stage, fetch, arrive or release",
                )
        return None

    def _arrive(self, phase: int) -> None:
        """Raises InvalidRequest for a phase after which there is no other, Fenced."""
        if phase >= _MAX_PHASE:
            raise InvalidRequest("a barrier that cannot be", expected=f"a phase below {_MAX_PHASE}", actual=str(phase))
        self._model.arrive(self._worker, phase)

    def _begin(self, header: pb.PushHeader) -> Incoming:
        """Check one header. Raises InvalidRequest."""
        layout = self._model.layout
        if header.sequence == 0:
            raise InvalidRequest("a push needs a sequence", expected="1 or more", actual="0")
        absent = frozenset(header.absent)
        if absent and max(absent) >= layout.parameter_slices:
            raise InvalidRequest(
                "an absent slice does not exist",
                shard=str(layout.shard),
                expected=f"indexes below {layout.parameter_slices}",
                actual=str(max(absent)),
            )
        if header.group_options:
            self._options = merge_options(layout.shard_map.spec, header.group_options)
        if header.table_options:
            self._row_options = merge_row_options(layout.shard_map.spec, header.table_options)
        rows = None
        if header.tables and not header.skipped:
            rows = self._announced(header)
        ranges = [] if header.skipped else layout.ranges(absent, buffers=header.with_buffers)
        if header.staged:
            ranges = subtract(ranges, self._staging.checked(header.staged))
        return Incoming(header, absent, self._options, ranges, rows)

    def _announced(self, header: pb.PushHeader) -> PushedRows:
        """Memory for the rows of a push, or where they lie already. Raises InvalidRequest."""
        tables, layout, options = header.tables, self._model.layout, self._row_options
        if not header.rows_in_room:
            return announced(tables, layout, options)
        if not header.push_only:
            return announced(tables, layout, options, self._carrier.pushed_rows)
        # It may be answered while its step is open: then the worker writes there again.
        rows = announced(tables, layout, options)
        rows.buffer[:] = self._carrier.pushed_rows(len(rows.buffer))
        return rows

    async def _receive(self, incoming: Incoming) -> Push:
        """Take the payload of a push from wherever it is. Raises InvalidRequest, ConnectionError."""
        header = incoming.header
        gradients = None
        if header.segment and not header.skipped:
            gradients = Gradients(self._carrier.gradients(header.segment), lent=True)
            await self._fill_pieces(header, _rows_pieces(incoming))
        elif not header.skipped:
            await self._one_region()
            gradients = Gradients(self._staging.take())
            try:
                await self._fill(gradients.region, incoming)
            except BaseException:
                # A push that stays a part is nothing, and its memory is free again.
                self._model.pool.give(gradients.region)
                raise
        self._staging.discard()
        self._counters.pushes += 1
        info = PushInfo(
            worker=self._worker,
            sequence=header.sequence,
            position=Position(header.phase, header.clock),
            pulled_version=header.pulled_version,
            skipped=header.skipped,
        )
        return Push(
            info,
            gradients,
            incoming.absent,
            incoming.options,
            with_buffers=header.with_buffers,
            push_only=header.push_only,
            finite=header.finite,
            ahead=header.ahead,
            rows=incoming.rows,
        )

    async def _asked(self, lookup: pb.Lookup) -> Asked:
        """Take the ids of a lookup. Raises InvalidRequest, ConnectionError."""
        layout = self._model.layout
        asked = wanted(lookup.tables, layout)
        if lookup.payload or not len(asked.buffer):
            scatter(lookup.payload, [asked.buffer])
        else:
            await self._carrier.receive_payload([asked.buffer])
        self._counters.bytes += len(asked.buffer)
        if lookup.now:
            return Asked(lookup.number, asked, None)
        if lookup.clock < 1:
            raise InvalidRequest("a lookup is for no push", expected="a clock from 1", actual=str(lookup.clock))
        return Asked(lookup.number, asked, Position(lookup.phase, lookup.clock - 1))

    async def _one_region(self) -> None:
        """Before memory is taken: see the last reply out, so that a stream needs one region at a time.

        Not for long: a worker may send several pushes before it reads its replies.
        """
        try:
            async with asyncio.timeout(None if self._replied.is_set() else REPLY_SECONDS):
                await self._replied.wait()
        except TimeoutError:
            logger.debug("%s pushes before it has read the reply before", self._worker)
        await self._model.spare_memory()

    async def _stage(self, stage: pb.Stage) -> None:
        """Take a part of the next push. Raises InvalidRequest, ConnectionError."""
        if self._coding:
            raise InvalidRequest("a part of a push came ahead on a stream with a wire format", expected="whole pushes")
        await self._one_region()
        piece = self._staging.place(stage.begin, stage.end)
        if stage.payload:
            scatter(stage.payload, [piece])
        else:
            await self._carrier.receive_payload([piece])
        self._counters.bytes += len(piece)

    async def _fill(self, region: Region, incoming: Incoming) -> None:
        """Write the payload of a push to ``region``. Raises as ``_receive``."""
        header, absent = incoming.header, incoming.absent
        encoded = self._coding.buffer(absent, buffers=header.with_buffers) if self._coding else None
        pieces = pieces_of(region.bytes, incoming.ranges) if encoded is None else [encoded]
        await self._fill_pieces(header, pieces + _rows_pieces(incoming))
        if self._coding and encoded is not None:
            await self._coding.decode(encoded, region, absent, buffers=header.with_buffers)

    async def _fill_pieces(self, header: pb.PushHeader, pieces: Sequence[memoryview]) -> None:
        """Read a payload that is in the header or behind it. Raises as ``_receive``."""
        if header.payload or not any(map(len, pieces)):
            scatter(header.payload, pieces)
        else:
            await self._carrier.receive_payload(pieces)
        self._counters.bytes += sum(map(len, pieces))

    async def _decide(self, push: Push) -> Answer:
        try:
            decision = await self._model.push(push)
        except (NonFiniteGradient, InvalidRequest, StorageFull, TableFull) as error:
            return Answer(push.info, push.push_only, error=error)
        self._counters.version = self._model.tracker.version
        self._counters.staleness = decision.staleness
        self._counters.dropped += decision.verdict in (Verdict.LATE, Verdict.STALE)
        return Answer(push.info, push.push_only, decision, push.ahead)

    async def _write(self) -> None:
        while (answer := await self._answers.get()) is not None:
            if isinstance(answer, Fetched):
                await self._reply(pb.StepResult(outcome=pb.OUTCOME_APPLIED, with_buffers=True))
            elif isinstance(answer, Asked):
                await self._rows(answer)
            elif answer.decision is None or answer.push_only:
                await self._model.settled()
                result = settled_result(answer, self._model)
                self._counters.dropped += answer.decision is not None and result.HasField("error")
                await self._carrier.send(pb.StepReply(result=result))
            else:
                await self._gate(answer.info.position, answer.ahead)
                await self._reply(self._with_differences(result_of(answer, self._model)), answer.info)

    def _with_differences(self, result: pb.StepResult) -> pb.StepResult:
        found = self._model.differences.of(self._worker)
        result.option_differences.extend(map(difference_to_pb, found[self._told :]))
        self._told = len(found)
        return result

    async def _gate(self, position: Position, ahead: int) -> None:
        """Wait until a pull at ``position`` may be answered, with a sign of life now and then."""
        # Reckoned anew each time: the mode may have changed meanwhile.
        while reason := self._model.tracker.blocker(self._model.pull_position(position, ahead)):
            parked = self._model.park(self._model.pull_position(position, ahead))
            try:
                await asyncio.wait_for(parked, WAITING_SECONDS)
            except TimeoutError:
                await self._carrier.send(pb.StepReply(waiting=pb.Waiting(reason=reason)))
            finally:
                if not parked.done() or parked.cancelled():
                    self._model.unpark(parked)

    async def _rows(self, asked: Asked) -> None:
        if asked.position is not None:
            await self._gate(asked.position, 0)
        room = self._carrier.room(asked.wanted.rows_bytes)
        # Not before the mode lets it be answered: who waits for others would hold what they need.
        async with self._budget.taken(self._worker, 0 if room is not None else asked.wanted.rows_bytes):
            try:
                version, rows = await self._model.look_up(asked.wanted, room)
            except InvalidRequest as error:
                await self._carrier.send_payload(pb.Rows(number=asked.number, error=to_detail(error)), [])
                return
            await self._carrier.send_rows(pb.Rows(number=asked.number, version=version), rows, in_room=room is not None)
        self._counters.bytes += len(rows)

    async def _reply(self, result: pb.StepResult, info: PushInfo | None = None) -> None:
        quick = self._carrier.transport == common_pb2.TRANSPORT_SHM
        self._replied.clear()
        # Read first: what is published holds these changes at least.
        number = self._model.last_changes.number
        try:
            async with self._model.published(quick=quick) as published:
                if result.sequence:
                    self._model.failpoints.hit("after_apply_before_reply")
                result.version = published.version
                if info:
                    self._counters.dropped += tell_skipped(result, info, self._model)
                raw = self._coding is not None and self._coding.needs_raw
                if result.sequence and not raw:
                    result.absent.extend(self._kept.unchanged())
                await send_published(self._carrier, result, published, self._model, self._counters, self._coding)
                self._kept.sent(number, raw=raw)
        finally:
            self._replied.set()


def _rows_pieces(incoming: Incoming) -> list[memoryview]:
    return [incoming.rows.buffer] if incoming.rows and not incoming.header.rows_in_room else []


async def _end(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def result_of(answer: Answer, model: ShardModel) -> pb.StepResult:
    """The result message of one push, without parameters."""
    info, decision, tracker = answer.info, answer.decision, model.tracker
    result = pb.StepResult(sequence=info.sequence, clock=info.position.clock, version=tracker.version)
    if decision is None:
        result.outcome = pb.OUTCOME_REFUSED
        if answer.error:
            result.error.CopyFrom(to_detail(answer.error))
        return result
    result.outcome = OUTCOMES[decision.verdict]
    result.staleness = model.staleness.get(info.worker.rank, 0)
    if decision.verdict is Verdict.HOLD and not tracker.may_pull(info.position):
        result.outcome = pb.OUTCOME_PENDING
    if decision.verdict is Verdict.LATE:
        result.clock = tracker.resume(info.position).clock
    return result


def settled_result(answer: Answer, model: ShardModel) -> pb.StepResult:
    """The result message of one push once everything decided has been done."""
    result = result_of(answer, model)
    if answer.decision is not None:
        tell_skipped(result, answer.info, model)
    return result


def tell_skipped(result: pb.StepResult, info: PushInfo, model: ShardModel) -> bool:
    """Say in ``result`` that the step of this push raised, if it did; whether it did."""
    error = model.skipped(info)
    if error is not None:
        result.outcome = pb.OUTCOME_SKIPPED
        result.error.CopyFrom(to_detail(error))
    return error is not None


async def send_published(
    carrier: Carrier,
    result: pb.StepResult,
    published: Published,
    model: ShardModel,
    counters: Counters,
    coding: Coding | None = None,
) -> None:
    """Send ``result`` with the published parameters, and buffers where the result says so."""
    encoded = await coding.encode(result, published.region) if coding else None
    if encoded is not None:
        await carrier.send_payload(result, [encoded])
    else:
        ranges = model.last_changes.ranges(tuple(result.absent), buffers=result.with_buffers)
        await carrier.send_parameters(result, published.region, ranges)
    counters.bytes += result.payload_bytes
