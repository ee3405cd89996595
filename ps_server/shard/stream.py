"""The step stream of one worker and one model: reads pushes, and answers them in order under the consistency mode."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ps_protocol.errors import InvalidRequest, NonFiniteGradient, PsError, to_detail
from ps_protocol.frames import STEP_CHUNK_FIELD, Scatter, cut, encode_chunk, parse_chunk, pieces_of
from ps_protocol.layout import total_bytes
from ps_protocol.model import Options
from ps_protocol.v1 import shard_pb2 as pb
from ps_server.consistency import Decision, Position, PushInfo, Verdict, WorkerKey
from ps_server.optimizers import Region
from ps_server.shard.counters import Counters
from ps_server.shard.model import Push, ShardModel
from ps_server.shard.options import merge_options
from ps_server.shard.snapshots import Snapshot

WAITING_SECONDS = 5.0
"""How often a parked pull gives a sign of life."""

PIPELINE_DEPTH = 4
"""Pushes of one stream that may be unanswered before the shard stops reading it."""

OUTCOMES = {
    Verdict.APPLY: pb.OUTCOME_APPLIED,
    Verdict.HOLD: pb.OUTCOME_APPLIED,
    Verdict.DUPLICATE: pb.OUTCOME_DUPLICATE,
    Verdict.LATE: pb.OUTCOME_LATE,
    Verdict.STALE: pb.OUTCOME_STALE,
    Verdict.SKIP: pb.OUTCOME_SKIPPED,
}

Context = grpc.aio.ServicerContext[bytes, bytes]


async def read(context: Context) -> bytes | None:
    """The next message of a stream, None once the client has sent its last."""
    data: Any = await context.read()
    return None if data is grpc.aio.EOF else bytes(data)


@dataclass(slots=True)
class Incoming:
    """A push whose payload is still arriving."""

    header: pb.PushHeader
    absent: frozenset[int]
    options: Sequence[Options]
    region: Region | None
    scatter: Scatter


@dataclass(frozen=True, slots=True)
class Answer:
    """What the writer still has to send for one push: the decision, or the error that refused it."""

    info: PushInfo
    push_only: bool
    decision: Decision | None = None
    error: PsError | None = None


class PushReader:
    """Turns the messages of one stream into whole pushes. Owned by one handler; used by Step and by Push alike."""

    def __init__(self, model: ShardModel, worker: WorkerKey, counters: Counters) -> None:
        self._model = model
        self._worker = worker
        self._counters = counters
        self._options: Sequence[Options] = model.layout.shard_map.spec.group_options
        self._incoming: Incoming | None = None

    def chunk(self, position: int, payload: memoryview) -> Push | None:
        """Take one chunk; returns the push it completes. Raises InvalidRequest."""
        if self._incoming is None:
            raise InvalidRequest("a chunk came before its push header", remedy="send PushHeader first")
        self._incoming.scatter.write(position, payload)
        self._counters.bytes += len(payload)
        return self._finish() if self._incoming.scatter.complete else None

    def begin(self, header: pb.PushHeader) -> Push | None:
        """Take one header; returns the push when it needs no payload. Raises InvalidRequest."""
        if self._incoming is not None:
            missing = self._incoming.scatter.expected_bytes - self._incoming.scatter.received_bytes
            raise InvalidRequest(
                "a push header came before the last push was whole",
                expected=f"{missing} more bytes of push {self._incoming.header.sequence}",
                actual=f"header of push {header.sequence}",
            )
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
        ranges = [] if header.skipped else layout.ranges(absent, buffers=header.with_buffers)
        region = None if header.skipped else self._model.pool.take()
        scatter = Scatter(pieces_of(region.bytes, ranges) if region else [])
        self._incoming = Incoming(header, absent, self._options, region, scatter)
        return self._finish() if not ranges else None

    def abandon(self) -> None:
        """The stream ended in the middle of a push: give its memory back."""
        if self._incoming and self._incoming.region:
            self._model.pool.give(self._incoming.region)
        self._incoming = None

    def _finish(self) -> Push:
        incoming, self._incoming = self._incoming, None
        if incoming is None:
            raise InvalidRequest("no push is under way")
        header = incoming.header
        info = PushInfo(
            worker=self._worker,
            sequence=header.sequence,
            position=Position(header.phase, header.clock),
            pulled_version=header.pulled_version,
            skipped=header.skipped,
        )
        self._counters.pushes += 1
        return Push(info, incoming.region, incoming.absent, incoming.options, header.with_buffers, header.push_only)


class StepStream:
    """One open stream, served by one handler: a task reads pushes, another writes their answers in order."""

    def __init__(self, context: Context, model: ShardModel, worker: WorkerKey, counters: Counters) -> None:
        self._context = context
        self._model = model
        self._worker = worker
        self._counters = counters
        self._reader = PushReader(model, worker, counters)
        self._answers: asyncio.Queue[Answer | None] = asyncio.Queue(PIPELINE_DEPTH)

    async def run(self) -> None:
        """Serve until the worker half-closes. Raises PsError for whatever breaks the protocol."""
        tasks = asyncio.create_task(self._read()), asyncio.create_task(self._write())
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._reader.abandon()

    async def push_once(self) -> pb.StepResult:
        """Read one push and decide it, without waiting for parameters. Raises PsError."""
        try:
            while (data := await read(self._context)) is not None:
                push = self._take(data)
                if push is not None:
                    decision = await self._model.push(push)
                    return result_of(Answer(push.info, True, decision), self._model)
        finally:
            self._reader.abandon()
        raise InvalidRequest("the stream ended before a whole push", expected="a push header and its chunks")

    async def _read(self) -> None:
        while (data := await read(self._context)) is not None:
            push = self._take(data)
            if push is not None:
                await self._answers.put(await self._decide(push))
        await self._answers.put(None)

    def _take(self, data: bytes) -> Push | None:
        chunk = parse_chunk(STEP_CHUNK_FIELD, data)
        if chunk is not None:
            return self._reader.chunk(*chunk)
        message = parse_request(data)
        match message.WhichOneof("body"):
            case "push":
                return self._reader.begin(message.push)
            case "chunk":
                return self._reader.chunk(message.chunk.position, memoryview(message.chunk.payload))
            case "arrive":
                self._model.arrive(self._worker, message.arrive.phase)
                return None
            case other:
                raise InvalidRequest(
                    "not a message of an open step stream", actual=str(other), expected="push or chunk"
                )

    async def _decide(self, push: Push) -> Answer:
        try:
            decision = await self._model.push(push)
        except (NonFiniteGradient, InvalidRequest) as error:
            return Answer(push.info, push.push_only, error=error)
        self._counters.version = self._model.tracker.version
        self._counters.staleness = decision.staleness
        return Answer(push.info, push.push_only, decision)

    async def _write(self) -> None:
        while (answer := await self._answers.get()) is not None:
            if answer.decision is None or answer.push_only:
                await self._context.write(pb.StepReply(result=result_of(answer, self._model)).SerializeToString())
            else:
                await self._gate(answer.info.position)
                await self._reply(answer)

    async def _gate(self, position: Position) -> None:
        """Wait until a pull at ``position`` may be answered, with a sign of life now and then."""
        while reason := self._model.tracker.blocker(position):
            parked = self._model.park(position)
            try:
                await asyncio.wait_for(parked, WAITING_SECONDS)
            except TimeoutError:
                await self._context.write(pb.StepReply(waiting=pb.Waiting(reason=reason)).SerializeToString())
            finally:
                if not parked.done() or parked.cancelled():
                    self._model.unpark(parked)

    async def _reply(self, answer: Answer) -> None:
        snapshot = await self._model.snapshot()
        try:
            self._model.failpoints.hit("after_log_before_reply")
            result = result_of(answer, self._model)
            result.version = snapshot.version
            await send_snapshot(self._context, result, snapshot, self._model, self._counters)
        finally:
            snapshot.give_back()


def parse_request(data: bytes) -> pb.StepRequest:
    """Raises InvalidRequest for bytes that are no StepRequest."""
    try:
        return pb.StepRequest.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(
            "a message is not a StepRequest", actual=f"{len(data)} bytes", expected=str(error)
        ) from error


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


async def send_snapshot(
    context: Context, result: pb.StepResult, snapshot: Snapshot, model: ShardModel, counters: Counters
) -> None:
    """Write ``result`` and the snapshot's bytes in chunks: parameters, and buffers where the result says so."""
    ranges = model.layout.ranges(buffers=result.with_buffers)
    result.payload_bytes = total_bytes(ranges)
    await context.write(pb.StepReply(result=result).SerializeToString())
    for position, pieces in cut(pieces_of(snapshot.region.bytes, ranges)):
        await context.write(encode_chunk(STEP_CHUNK_FIELD, position, pieces))
    counters.bytes += result.payload_bytes
