"""Stands for a server of ``grpc.aio``: takes calls from the network and runs their handlers as tasks."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from simulation.runtime.calls import END, Call, CallError, Metadata
from simulation.runtime.kernel import Killed, Process, Violation
from simulation.runtime.network import Network


class Server:
    """Serves at one address, in the process that makes it, until ``stop`` or the end of the process."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self.process = process
        self.address = address
        self.closed = False
        self.network = network
        self.calls: dict[ServerCall, None] = {}
        self._handlers: list[grpc.GenericRpcHandler] = []
        #: By method, before those of ``_handlers``.
        self._registered: dict[str, Any] = {}
        network.servers[address] = self

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler, ...]) -> None:
        """As of grpc."""
        self._handlers.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """As of grpc; one that is added later takes the place of one before."""
        self._registered.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    def handler(self, method: str, metadata: Metadata) -> Any:
        """What serves ``method``."""
        if method in self._registered:
            return self._registered[method]
        details = _Details(method, metadata)
        found = (each.service(details) for each in self._handlers)
        return next(handler for handler in found if handler is not None)

    def call(self, call: Call) -> ServerCall:
        """The server's side of ``call``, which is on its way."""
        return ServerCall(self, call)

    async def stop(self, grace_seconds: float | None = None) -> None:
        """Take no more calls; cancel those that still run after the grace."""
        self.closed = True
        self.network.servers.pop(self.address, None)
        running = [call.task for call in self.calls if call.task]
        if running and grace_seconds:
            await asyncio.wait(running, timeout=grace_seconds)
        for call in list(self.calls):
            call.end(CallError(grpc.StatusCode.UNAVAILABLE, "the server has shut down"))
            call.cancel()


class _Details(grpc.HandlerCallDetails):
    def __init__(self, method: str, metadata: Metadata) -> None:
        self.method = method
        self.invocation_metadata = metadata  # type: ignore[assignment]


class ServerCall:
    """One call at the server; it is the handler's context, too."""

    def __init__(self, server: Server, call: Call) -> None:
        self.process = server.process
        self.task: asyncio.Task[None] | None = None
        self._server = server
        self._call = call
        self._arrived: deque[Any] = deque()
        self._reading: asyncio.Future[None] | None = None
        self._ended = False
        self._done: list[Callable[[Any], object]] = []

    # -- what arrives

    def begin(self) -> None:
        """The request has come."""
        if self._server.closed:
            self.end(CallError(grpc.StatusCode.UNAVAILABLE, "the server shuts down"))
            return
        self._server.calls[self] = None
        self.task = asyncio.get_running_loop().create_task(self._serve(), name=self._call.method)
        self.task.add_done_callback(self._over)

    def receive(self, message: Any) -> None:
        """A message of the client, or END."""
        self._arrived.append(message)
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)

    def cancel(self) -> None:
        """The client is gone."""
        self._ended = True
        if self.task is not None and not self.task.done():
            self.task.cancel()

    def end(self, error: CallError | None = None) -> None:
        """Send the status."""
        if not self._ended:
            self._ended = True
            self._call.close(error)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._server.calls.pop(self, None)
        self._server.network.end(self._call, self.process)
        self.task = self._call.server = None
        for callback in self._done:
            callback(self)

    async def _serve(self) -> None:
        try:
            await self._handle()
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            self.end(CallError(grpc.StatusCode.CANCELLED, "cancelled by the server"))
        except (Killed, Violation):
            raise
        except BaseException as error:  # noqa: BLE001 -- as grpc does
            self.end(CallError(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error).__name__}: {error}"))
        else:
            self.end()

    async def _handle(self) -> None:
        handler = self._server.handler(self._call.method, self._call.metadata)
        parse = handler.request_deserializer or _same
        write = handler.response_serializer or _same
        request: Any
        if handler.request_streaming:
            serve, request = handler.stream_stream or handler.stream_unary, self._requests(parse)
        else:
            serve, request = handler.unary_stream or handler.unary_unary, parse(await self.read())
        if inspect.isasyncgenfunction(serve):
            async for reply in serve(request, self):
                await self.write(write(reply))
        else:
            reply = await serve(request, self)
            if not handler.response_streaming:
                self._call.reply(write(reply))

    async def _requests(self, parse: Callable[[bytes], Any]) -> AsyncIterator[Any]:
        while (data := await self.read()) is not grpc.aio.EOF:
            yield parse(data)

    # -- the context of the handler

    async def read(self) -> Any:
        """The next message, grpc.aio.EOF after the last."""
        while not self._arrived:
            self._reading = asyncio.get_running_loop().create_future()
            await self._reading
        if self._arrived[0] is END:
            return grpc.aio.EOF
        return self._arrived.popleft()

    async def write(self, data: bytes) -> None:
        """Send one message."""
        if not self._ended:
            self._call.reply(bytes(data))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> None:
        """End with an error. Raises grpc.aio.AbortError."""
        if self._ended:
            raise grpc.aio.InternalError("the call has ended")
        self.end(CallError(code, details, trailing_metadata))
        raise grpc.aio.AbortError

    def invocation_metadata(self) -> Metadata:
        """What the client sent with the call."""
        return self._call.metadata

    def time_remaining(self) -> float | None:
        """Until the client's deadline."""
        deadline = self._call.deadline
        return None if deadline is None else max(0.0, deadline - self._server.network.kernel.now)

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call it when the call is over."""
        self._done.append(callback)

    def peer(self) -> str:
        """Who calls."""
        return self._call.client.name


def _same(data: bytes) -> bytes:
    return data
