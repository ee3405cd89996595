"""Step streams that begin well, and whose later messages are mutations of what should come next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.message import Message

from fuzz.identity import Identity
from fuzz.messages import Generator
from fuzz.templates import exchange, opening
from ps_protocol.v1 import shard_pb2 as pb

_STEP = f"/{pb.DESCRIPTOR.services_by_name['Shard'].full_name}/Step"

_TAKEN = (pb.OUTCOME_APPLIED, pb.OUTCOME_DUPLICATE, pb.OUTCOME_SKIPPED, pb.OUTCOME_STALE)

_ANSWER_SECONDS = 0.05
"""How long an answer is waited for before the next message; many have none."""


class Stepper:
    """One worker's stream, opened again and again. One at a time: a newer stream of a worker ends the older."""

    def __init__(self, channel: grpc.aio.Channel, identity: Identity, generator: Generator) -> None:
        self._channel = channel
        self._identity = identity
        self._generator = generator
        self._position = (0, 0, 0)
        self._answered = asyncio.Event()

    async def run(self, count: int, allowed: Callable[[Message], bool], seconds: float) -> Any:
        """Send ``count`` messages on one stream. Returns the call, ended."""
        call: Any = self._channel.stream_stream(_STEP)(timeout=seconds)
        reader: asyncio.Task[None] | None = None
        try:
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(opening(self._identity).SerializeToString())
                reader = asyncio.create_task(self._read(call))
                for _ in range(count):
                    self._answered.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_ANSWER_SECONDS):
                            await self._answered.wait()
                    sequence, phase, clock = self._position
                    valid = exchange(self._identity, sequence + 1, phase, clock + 1)
                    template = self._generator.random.choice(valid)
                    await call.write(self._generator.bytes_of(pb.StepRequest, allowed, template))
                await call.done_writing()
            if reader:
                await reader
        finally:
            call.cancel()
        return call

    async def _read(self, call: Any) -> None:
        with suppress(grpc.aio.AioRpcError):
            while (data := await call.read()) is not grpc.aio.EOF:
                reply = pb.StepReply.FromString(data)
                match reply.WhichOneof("body"):
                    case "opened":
                        opened = reply.opened
                        self._position = opened.last_sequence, opened.phase, opened.clock
                    case "result" if reply.result.outcome in _TAKEN:
                        _, phase, _ = self._position
                        self._position = reply.result.sequence, phase, reply.result.clock
                self._answered.set()
