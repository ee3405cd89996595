"""Stands for the channels of ``grpc.aio``: called by coroutines."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable
from typing import Any, Self

import grpc

from simulation.runtime.calls import END, CallError, Metadata
from simulation.runtime.channel import BaseChannel, Codec, same


class AioChannel(BaseChannel):
    """As ``grpc.aio.Channel``: called by coroutines."""

    def unary_unary(
        self, method: str, request_serializer: Codec = None, response_deserializer: Codec = None, **_: Any
    ) -> Any:
        """See grpc."""

        async def call(
            request: Any,
            timeout: float | None = None,  # noqa: ASYNC109 -- as of grpc
            metadata: Metadata | None = None,
            wait_for_ready: bool | None = None,
        ) -> Any:
            made = AioCall(self, method, metadata, timeout, wait_for_ready)
            await made.write((request_serializer or same)(request))
            return (response_deserializer or same)(await made.reply())

        return call

    def stream_unary(
        self, method: str, request_serializer: Codec = None, response_deserializer: Codec = None, **_: Any
    ) -> Any:
        """See grpc."""

        async def call(
            requests: AsyncIterable[Any],
            timeout: float | None = None,  # noqa: ASYNC109 -- as of grpc
            metadata: Metadata | None = None,
        ) -> Any:
            made = AioCall(self, method, metadata, timeout, None)
            async for request in requests:
                await made.write((request_serializer or same)(request))
            return (response_deserializer or same)(await made.reply())

        return call

    def unary_stream(
        self, method: str, request_serializer: Codec = None, response_deserializer: Codec = None, **_: Any
    ) -> Any:
        """See grpc."""

        def call(request: Any, timeout: float | None = None, metadata: Metadata | None = None) -> AioCall:
            made = AioCall(self, method, metadata, timeout, None)
            made.send((request_serializer or same)(request))
            made.send(END)
            return made

        return call

    def stream_stream(
        self, method: str, request_serializer: Codec = None, response_deserializer: Codec = None, **_: Any
    ) -> Any:
        """See grpc."""

        def call(timeout: float | None = None, metadata: Metadata | None = None) -> AioCall:
            return AioCall(self, method, metadata, timeout, None)

        return call

    async def close(self, grace: float | None = None) -> None:
        """End all calls."""
        self.end_all()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AioCall:
    """One call as coroutines see it."""

    def __init__(
        self,
        channel: AioChannel,
        method: str,
        metadata: Metadata | None,
        timeout: float | None,
        wait_for_ready: bool | None,
    ) -> None:
        self._arrived: deque[bytes] = deque()
        self._reading: asyncio.Future[None] | None = None
        self._error: CallError | None = None
        self._ended = False
        self._call = channel.begin(method, metadata, timeout, wait_for_ready, self._take, self._end)

    def send(self, message: Any) -> None:
        """One message, or END."""
        self._call.send(message)

    def _take(self, message: bytes) -> None:
        self._arrived.append(message)
        self._wake()

    def _end(self, error: CallError | None) -> None:
        self._ended, self._error = True, error
        self._wake()

    def _wake(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)

    async def read(self) -> Any:
        """The next message, grpc.aio.EOF after the last. Raises how the call failed."""
        while not self._arrived:
            if self._error is not None:
                raise self._error
            if self._ended:
                return grpc.aio.EOF
            self._reading = asyncio.get_running_loop().create_future()
            await self._reading
        return self._arrived.popleft()

    async def write(self, data: bytes) -> None:
        """Send one message. Raises how the call failed."""
        if self._error is not None:
            raise self._error
        self.send(bytes(data))

    async def done_writing(self) -> None:
        """It was the last."""
        self.send(END)

    async def reply(self) -> bytes:
        """Send no more, and wait for the one reply. Raises how the call failed."""
        await self.done_writing()
        try:
            data = await self.read()
        finally:
            self.cancel()
        if data is grpc.aio.EOF:
            raise CallError(grpc.StatusCode.INTERNAL, "no reply")
        return bytes(data)

    def cancel(self) -> bool:
        """Give it up."""
        self._call.cancel()
        return True
