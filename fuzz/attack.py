"""Sends messages to one role over every method it has, many at a time, and counts what came back."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from fuzz.identity import Identity
from fuzz.messages import Generator
from fuzz.streams import Stepper
from fuzz.templates import calls, exchange, opening
from ps_protocol.v1 import common_pb2, shard_pb2
from ps_protocol.wire.socket_messages import framed

CALL_SECONDS = 1.5
"""A call is given up after this: some are meant to wait."""

PER_STREAM = 12
"""Most messages on one stream."""

_CUT_SHORT = "Internal error from Core"
"""What gRPC's client says when a server ends a call that is still being written; the status is not told."""

_READ = 64
"""Most answers read of one stream."""

#: Whether a message may be sent: not what the job lets every caller do to all others.
Allowed = Callable[[Message], bool]


@dataclass
class Tally:
    """What has been sent, and what came back."""

    messages: Counter[str] = field(default_factory=Counter)
    #: By method and gRPC status.
    answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: Of these, what the last one said.
    said: dict[tuple[str, str], str] = field(default_factory=dict)

    def answered(self, method: str, code: grpc.StatusCode, details: str | None) -> None:
        """One call ended."""
        status = "CUT_SHORT" if details == _CUT_SHORT else code.name
        self.answers[method, status] += 1
        self.said[method, status] = (details or "")[:200]

    @property
    def total(self) -> int:
        """Messages sent."""
        return sum(self.messages.values())

    @property
    def untyped(self) -> list[str]:
        """Answers that no server of ours gives on purpose: UNKNOWN, and INTERNAL, which is for defects."""
        wrong = (grpc.StatusCode.UNKNOWN.name, grpc.StatusCode.INTERNAL.name)
        return [
            f"{method}: {count} × {status}, such as: {self.said[method, status]}"
            for (method, status), count in self.answers.items()
            if status in wrong
        ]


class Attack:
    """On one service of one server, from one event loop."""

    def __init__(
        self,
        address: str,
        service: ServiceDescriptor,
        generator: Generator,
        identity: Identity,
        allowed: Allowed,
        weights: Mapping[str, float],
    ) -> None:
        """``weights``: how often a method is chosen, by name; 1 where not named."""
        self.tally = Tally()
        self._address = address
        self._methods: Sequence[MethodDescriptor] = list(service.methods)
        self._weights = [weights.get(method.name, 1.0) for method in self._methods]
        self._service = service.full_name
        self._generator = generator
        self._identity = identity
        self._allowed = allowed
        self._templates = calls(identity)

    async def run(self, messages: int, at_once: int = 128) -> None:
        """Send ``messages``, in ``at_once`` calls at a time. Raises nothing of what the server answers."""
        async with grpc.aio.insecure_channel(self._address, options=(("grpc.enable_http_proxy", 0),)) as channel:

            async def call_on() -> None:
                while self.tally.total < messages:
                    (method,) = self._generator.random.choices(self._methods, self._weights)
                    await self._call(channel, method)

            stepping = [self._step_on(channel, messages)] if "Step" in {method.name for method in self._methods} else []
            await asyncio.gather(*(call_on() for _ in range(at_once)), *stepping)

    async def _step_on(self, channel: grpc.aio.Channel, messages: int) -> None:
        """Streams that get as far as a worker's do, one after the other beside the calls."""
        stepper = Stepper(channel, self._identity, self._generator)
        while self.tally.total < messages:
            count = self._generator.random.randint(1, 3 * PER_STREAM)
            call = await stepper.run(count, self._allowed, 2 * CALL_SECONDS)
            self.tally.messages["Step"] += count
            self.tally.answered("Step", await call.code(), await call.details())

    async def _call(self, channel: grpc.aio.Channel, method: MethodDescriptor) -> None:
        sent = self._messages(method)
        count = len(sent)
        self.tally.messages[method.name] += count
        path = f"/{self._service}/{method.name}"
        call: Any
        if method.client_streaming and method.server_streaming:
            call = channel.stream_stream(path)(_each(sent), timeout=CALL_SECONDS)
        elif method.client_streaming:
            call = channel.stream_unary(path)(_each(sent), timeout=CALL_SECONDS)
        elif method.server_streaming:
            call = channel.unary_stream(path)(sent[0], timeout=CALL_SECONDS)
        else:
            call = channel.unary_unary(path)(sent[0], timeout=CALL_SECONDS)
        try:
            await (_read(call) if method.server_streaming else call)
        except grpc.aio.AioRpcError:
            pass
        except asyncio.CancelledError:
            # So gRPC's client ends some calls that the server ended first.
            if not call.done():
                raise
        self.tally.answered(method.name, await call.code(), await call.details())

    def _messages(self, method: MethodDescriptor) -> Sequence[bytes]:
        kind, draw = GetMessageClass(method.input_type), self._generator.random
        templates: Sequence[Message | None] = self._templates.get(method.name, [None])
        if method.client_streaming and draw.random() < 0.5:
            templates = [*templates, *draw.choices(templates, k=draw.randint(1, PER_STREAM))]
        return [self._generator.bytes_of(kind, self._allowed, template) for template in templates]


async def _each(sent: Sequence[bytes]) -> AsyncIterator[bytes]:
    for message in sent:
        yield message


async def _read(call: Any) -> None:
    for _ in range(_READ):
        if await call.read() is grpc.aio.EOF:
            return
    call.cancel()


async def attack_sockets(
    shard: str, identity: Identity, generator: Generator, allowed: Allowed, messages: int
) -> Tally:
    """Send ``messages`` on the sockets that a shard offers beside its streams: with the token, and without."""
    tally, draw = Tally(), generator.random
    host = shard.rpartition(":")[0]
    async with grpc.aio.insecure_channel(shard) as channel:
        step = channel.stream_stream(f"/{shard_pb2.DESCRIPTOR.services_by_name['Shard'].full_name}/Step")
        while tally.total < messages:
            hello = opening(identity)
            hello.open.transports.append(common_pb2.TRANSPORT_BULK)
            call = step(timeout=CALL_SECONDS)
            valid = exchange(identity, draw.randint(1, 3), 0, draw.randint(1, 3))
            sent = [_frame(generator, allowed, draw.choice(valid)) for _ in range(draw.randint(1, PER_STREAM))]
            tally.messages["socket"] += len(sent)
            try:
                await call.write(hello.SerializeToString())
                reply = await call.read()
                if reply is grpc.aio.EOF:
                    continue
                opened = shard_pb2.StepReply.FromString(reply).opened
                for offered in opened.side_channels:
                    attach = shard_pb2.StepRequest(attach=shard_pb2.Attach(token=offered.token))
                    confirm = shard_pb2.StepRequest(confirm=shard_pb2.Confirm())
                    begun = [framed(each.SerializeToString()) for each in (attach, confirm)]
                    await _talk(host, offered.port, begun + sent if draw.random() < 0.7 else sent)
            except grpc.aio.AioRpcError:
                pass
            finally:
                call.cancel()
                tally.answered("socket", await call.code(), await call.details())
    return tally


def _frame(generator: Generator, allowed: Allowed, template: shard_pb2.StepRequest) -> bytes:
    draw = generator.random
    if draw.random() < 0.15:
        return draw.randbytes(draw.randint(1, 60))
    data = generator.bytes_of(shard_pb2.StepRequest, allowed, template)
    length = len(data) if draw.random() < 0.95 else draw.choice((0, 1, 1 << 20, (1 << 32) - 1))
    return struct.pack("<I", length) + data


async def _talk(host: str, port: int, sent: Sequence[bytes]) -> None:
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(CALL_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(b"".join(sent))
                writer.write_eof()
                await writer.drain()
                while await reader.read(1 << 16):
                    pass
            finally:
                writer.close()
