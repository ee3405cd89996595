"""How long a payload over gRPC may take: each message its time, the whole as long as messages come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import pytest

from ps_protocol.cluster.answers import StepAnswer
from ps_protocol.wire.chunks import STEP_REQUESTS
from ps_protocol.wire.frames import encode_chunk
from ps_server.shard.transport.grpc_stream import GrpcServerTransport
from tests.support.loops import in_loop

STALL_SECONDS = 0.2


class Context:
    """A call whose messages come, and are taken, after ``pauses``: no other time passes on its loop."""

    def __init__(self, messages: Sequence[bytes] = (), pauses: Sequence[float] = ()) -> None:
        self._messages, self._pauses = iter(messages), iter(pauses)
        self._now = 0.0
        asyncio.get_running_loop().time = lambda: self._now  # type: ignore[method-assign]
        self.written: list[bytes] = []

    async def read(self) -> object:
        await self._pause()
        return next(self._messages, grpc.aio.EOF)

    async def write(self, data: bytes) -> None:
        await self._pause()
        self.written.append(data)

    async def _pause(self) -> None:
        end = self._now + next(self._pauses, 0.0)
        while self._now < end:
            self._now = min(end, self._now + STALL_SECONDS / 10)
            await asyncio.sleep(0)  # what is due by now is done


def chunks(count: int) -> list[bytes]:
    """A payload of ``count`` bytes, one in each chunk."""
    return [encode_chunk(STEP_REQUESTS.field, position, [b"x"]) for position in range(count)]


@in_loop
async def test_a_push_may_take_many_times_the_limit_while_its_chunks_come():
    into = bytearray(8)
    transport = GrpcServerTransport(Context(chunks(8), [0.1] * 8), STALL_SECONDS)
    await transport.receive_payload([memoryview(into)])
    assert into == b"x" * 8


@in_loop
async def test_a_push_that_stalls_ends_the_stream():
    transport = GrpcServerTransport(Context(chunks(2), [0.0, 60.0]), STALL_SECONDS)
    with pytest.raises(ConnectionAbortedError, match="stalled in the middle of a push"):
        await transport.receive_payload([memoryview(bytearray(2))])


@in_loop
async def test_a_stream_that_ends_in_a_push_is_named():
    transport = GrpcServerTransport(Context(chunks(1)), STALL_SECONDS)
    with pytest.raises(ConnectionResetError, match="ended in the middle of a push"):
        await transport.receive_payload([memoryview(bytearray(2))])


@in_loop
async def test_an_answer_may_take_many_times_the_limit_while_its_chunks_are_read():
    context = Context(pauses=[0.1] * 9)
    await GrpcServerTransport(context, STALL_SECONDS).send_payload(StepAnswer(1), [memoryview(bytes(8 << 20))])
    assert len(context.written) == 9


@in_loop
async def test_an_answer_that_is_not_read_ends_the_stream():
    context = Context(pauses=[0.0, 60.0])
    with pytest.raises(ConnectionAbortedError, match="does not read"):
        await GrpcServerTransport(context, STALL_SECONDS).send_payload(StepAnswer(1), [memoryview(bytes(2 << 20))])
    assert len(context.written) == 1
