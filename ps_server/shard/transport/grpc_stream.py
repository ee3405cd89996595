"""The gRPC transport: everything on the stream itself, payloads as chunks. Works everywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import grpc

from ps_protocol import times
from ps_protocol.cluster.answers import Answer, RowsAnswer, StepAnswer, StepReply
from ps_protocol.cluster.requests import StepRequest
from ps_protocol.cluster.transport import Transport
from ps_protocol.errors import InternalError, Unavailable
from ps_protocol.model.layout import Range
from ps_protocol.wire.chunks import STEP_REPLIES, STEP_REQUESTS, ChunkReceiver
from ps_protocol.wire.convert.step import reply_to_bytes, reply_to_pieces, request_from_bytes
from ps_protocol.wire.frames import CHUNK_BYTES
from ps_server.limits import FIRST_MESSAGE, LimitCounts
from ps_server.shard.transport.base import AtOnce, no_segments
from ps_server.state.region import Region
from ps_server.tasks import seen

Context = grpc.aio.ServicerContext[bytes, bytes]

_SLACK = 1.25
"""A stalled payload is given up after its time, or up to a quarter later: see ``_renew``."""


async def read(context: Context) -> bytes | None:
    """The next message of a stream, None once the client has sent its last."""
    data: Any = await context.read()
    return None if data is grpc.aio.EOF else bytes(data)


async def read_soon(context: Context, seconds: float = times.PATIENCE_SECONDS) -> bytes | None:
    """As ``read``, where the client owes a message. Raises Unavailable when none comes."""
    try:
        async with asyncio.timeout(seconds):
            return await read(context)
    except TimeoutError:
        raise Unavailable(
            "a call was given up: its client sent nothing",
            expected=f"the next message within {seconds:g} s",
            remedy="call again",
        ) from None


async def read_first(context: Context, seconds: float, counts: LimitCounts) -> bytes | None:
    """As ``read_soon``, of the first message of a call; a refusal is one of ``counts``."""
    try:
        return await read_soon(context, seconds)
    except Unavailable:
        counts.add(FIRST_MESSAGE)
        raise


async def write(context: Context, data: bytes, seconds: float = times.PATIENCE_SECONDS) -> None:
    """Send one message. Raises Unavailable when the client does not read: what waits to be sent takes memory."""
    try:
        async with asyncio.timeout(seconds):
            await context.write(data)
    except TimeoutError:
        raise Unavailable(
            "a call was given up: its client does not read",
            expected=f"some bytes read within {seconds:g} s",
            remedy="call again",
        ) from None


@contextmanager
def reader_gone() -> Iterator[None]:
    """Turn the ConnectionError of a transport into Unavailable."""
    try:
        yield
    except ConnectionError as error:
        raise Unavailable(f"a call was given up: {error}", remedy="call again") from None


class GrpcServerTransport:
    """A ServerTransport on one gRPC stream, and the anchor of a side channel."""

    kind = Transport.GRPC

    def __init__(self, context: Context, stall_seconds: float = times.PATIENCE_SECONDS) -> None:
        self._context = context
        self._stall_seconds = stall_seconds
        self._first: asyncio.Future[bytes | None] | None = None

    def begun(self) -> asyncio.Future[bytes | None]:
        """The first message, which ``receive`` will give again. The transport owns the reading until ``close``."""
        if self._first is None:
            self._first = seen(asyncio.ensure_future(read(self._context)))
        return self._first

    def close(self) -> None:
        """Nothing is received any more: a reading that nobody took over ends."""
        if self._first is not None:
            self._first.cancel()
            self._first = None

    async def _read(self) -> bytes | None:
        first, self._first = self._first, None
        return await (first if first is not None else read(self._context))

    async def receive(self, at_once: AtOnce | None = None) -> StepRequest | None:
        """The next message that is no chunk; none is dealt with at once."""
        data = await self._read()
        if data is None:
            return None
        return request_from_bytes(data)

    async def receive_payload(self, pieces: Sequence[memoryview]) -> None:
        """Chunks until the payload is whole."""
        receiver = ChunkReceiver(STEP_REQUESTS, pieces, "a push")
        try:
            async with asyncio.timeout(_SLACK * self._stall_seconds) as limit:
                await receiver.receive_async(partial(self._read_chunk, limit))
        except TimeoutError as error:
            raise ConnectionAbortedError("the worker stalled in the middle of a push") from error

    async def _read_chunk(self, limit: asyncio.Timeout) -> bytes:
        data: Any = await self._context.read()
        if data is grpc.aio.EOF:
            raise ConnectionResetError("the stream ended in the middle of a push")
        _renew(limit, self._stall_seconds)
        return bytes(data)

    def gradients(self, segment: int) -> Region:
        """There is no shared memory here."""
        raise no_segments(self.kind)

    def pushed_rows(self, size: int) -> memoryview:
        """There is no shared memory here."""
        raise no_segments(self.kind)

    def room(self, size: int) -> memoryview | None:
        """There is no shared memory here."""
        return None

    async def send_rows(self, rows: RowsAnswer, values: memoryview, *, in_room: bool) -> None:
        """As any payload."""
        await self.send_payload(rows, [values])

    async def send(self, reply: StepReply) -> None:
        """One message."""
        await self._write((reply_to_bytes(reply),))

    def send_at_once(self, answer: StepAnswer, region: Region, ranges: Sequence[Range]) -> bool:
        """Never called: what is sent here has to be waited for, and no message is dealt with at once."""
        raise InternalError("gRPC sends no answer at once")

    async def send_rest(self) -> None:
        """Nothing is left."""

    async def send_parameters(self, answer: StepAnswer, region: Region, ranges: Sequence[Range]) -> None:
        """As any payload."""
        await self.send_payload(answer, region.pieces(ranges))

    async def send_payload(self, answer: Answer, payload: Sequence[memoryview]) -> None:
        """The result with the payload in it; chunks behind it where the payload is larger than one."""
        answer.payload_bytes = sum(map(len, payload))
        if answer.payload_bytes <= CHUNK_BYTES:
            await self._write((b"".join(reply_to_pieces(answer, payload)),))
        else:
            await self._write(chain((reply_to_bytes(answer),), STEP_REPLIES.chunks(payload)))

    def released(self) -> None:
        """Nothing is lent on this transport."""

    async def _write(self, messages: Iterable[bytes]) -> None:
        try:
            async with asyncio.timeout(_SLACK * self._stall_seconds) as limit:
                for data in messages:
                    _renew(limit, self._stall_seconds)
                    await self._context.write(data)
        except TimeoutError as error:
            raise ConnectionAbortedError("the worker does not read its stream") from error


def _renew(limit: asyncio.Timeout, seconds: float) -> None:
    """After progress: ``limit`` is ``seconds`` away at least. Its timer is set again rarely: that takes long."""
    now = asyncio.get_running_loop().time()
    if (limit.when() or 0.0) < now + seconds:
        limit.reschedule(now + _SLACK * seconds)
