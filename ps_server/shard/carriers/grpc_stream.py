"""The gRPC carrier: everything on the stream itself, payloads as chunks. Works everywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from ps_protocol.errors import InvalidRequest, Unavailable
from ps_protocol.frames import STEP_CHUNK_FIELD, Scatter, cut, encode_chunk, parse_chunk, pieces_of
from ps_protocol.layout import Range
from ps_protocol.messages import STALL_SECONDS
from ps_protocol.v1 import common_pb2
from ps_protocol.v1 import shard_pb2 as pb
from ps_server.optimizers import Region
from ps_server.shard.carriers.carrier import Payload, no_segments, parse_request, put_inline, reply_of

Context = grpc.aio.ServicerContext[bytes, bytes]


async def read(context: Context) -> bytes | None:
    """The next message of a stream, None once the client has sent its last."""
    data: Any = await context.read()
    return None if data is grpc.aio.EOF else bytes(data)


async def read_soon(context: Context, seconds: float = STALL_SECONDS) -> bytes | None:
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


async def write(context: Context, data: bytes, seconds: float = STALL_SECONDS) -> None:
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
    """Turn the ConnectionError of a carrier into Unavailable, where nobody else waits for it."""
    try:
        yield
    except ConnectionError as error:
        raise Unavailable(f"a call was given up: {error}", remedy="call again") from None


class GrpcCarrier:
    """Keeps the contract of ``Carrier`` on one gRPC stream, and is the anchor of a side channel."""

    transport = common_pb2.TRANSPORT_GRPC

    def __init__(self, context: Context, stall_seconds: float = STALL_SECONDS) -> None:
        self._context = context
        self._stall_seconds = stall_seconds
        self._first: asyncio.Future[bytes | None] | None = None

    async def begun(self) -> bytes | None:
        """The first message, which ``receive`` will give again."""
        return await read(self._context)

    def watch(self, first: asyncio.Future[bytes | None]) -> None:
        """Take over a ``begun`` that somebody else waited for."""
        self._first = first

    async def _read(self) -> bytes | None:
        first, self._first = self._first, None
        return await (first if first is not None else read(self._context))

    async def receive(self) -> pb.StepRequest | None:
        """The next message that is no chunk."""
        data = await self._read()
        if data is None:
            return None
        message = parse_request(data) if parse_chunk(STEP_CHUNK_FIELD, data) is None else None
        if message is None or message.WhichOneof("body") == "chunk":
            raise InvalidRequest("a chunk came before its push header", remedy="send PushHeader first")
        return message

    async def receive_payload(self, pieces: Sequence[memoryview]) -> None:
        """Chunks until the payload is whole."""
        scatter = Scatter(pieces)
        while not scatter.complete:
            try:
                data = await read_soon(self._context, self._stall_seconds)
            except Unavailable as error:
                raise ConnectionAbortedError("the worker stalled in the middle of a push") from error
            if data is None:
                raise ConnectionResetError("the stream ended in the middle of a push")
            chunk = parse_chunk(STEP_CHUNK_FIELD, data) or _other_chunk(data, scatter)
            scatter.write(*chunk)

    def gradients(self, segment: int) -> Region:
        """There is no shared memory here."""
        raise no_segments(self.transport)

    def pushed_rows(self, size: int) -> memoryview:
        """There is no shared memory here."""
        raise no_segments(self.transport)

    def room(self, size: int) -> memoryview | None:
        """There is no shared memory here."""
        return None

    async def send_rows(self, rows: pb.Rows, values: memoryview, *, in_room: bool) -> None:
        """As any payload."""
        await self.send_payload(rows, [values])

    async def send(self, reply: pb.StepReply) -> None:
        """One message."""
        await self._write(reply.SerializeToString())

    async def send_parameters(self, result: pb.StepResult, region: Region, ranges: Sequence[Range]) -> None:
        """As any payload."""
        await self.send_payload(result, pieces_of(region.bytes, ranges))

    async def send_payload(self, result: Payload, payload: Sequence[memoryview]) -> None:
        """The result, and chunks behind it unless the payload is small."""
        inline = put_inline(result, payload)
        await self._write(reply_of(result).SerializeToString())
        if not inline:
            for position, pieces in cut(payload):
                await self._write(encode_chunk(STEP_CHUNK_FIELD, position, pieces))

    def released(self) -> None:
        """Nothing is lent on this carrier."""

    async def _write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._stall_seconds):
                await self._context.write(data)
        except TimeoutError as error:
            raise ConnectionAbortedError("the worker does not read its stream") from error


def _other_chunk(data: bytes, scatter: Scatter) -> tuple[int, memoryview]:
    """A chunk in a valid form that frames.py leaves to the generated class. Raises InvalidRequest."""
    message = parse_request(data)
    if message.WhichOneof("body") != "chunk":
        missing = scatter.expected_bytes - scatter.received_bytes
        raise InvalidRequest(
            f"a message of kind {message.WhichOneof('body')} came before the last push was whole",
            expected=f"{missing} more bytes in chunks",
        )
    return message.chunk.position, memoryview(message.chunk.payload)
