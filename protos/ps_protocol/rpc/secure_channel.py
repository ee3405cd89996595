"""Channels that show credentials with every call, and connect again when certificate files were replaced."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from ps_protocol.errors import PsError
from ps_protocol.security.credentials import SessionCredential, ShownCredentials
from ps_protocol.security.security import Security

Metadata = tuple[tuple[str, str | bytes], ...]

OpenOne = Callable[[ShownCredentials], Any]
"""Opens a channel of gRPC with the certificates in ``ShownCredentials.files``, as they were read once."""


class CallCredentials:
    """The credentials that calls of one channel show, as they are at the time of a call."""

    def __init__(self, security: Security, session: SessionCredential | None, to_shard: bool) -> None:
        self._security = security
        self._session = session
        self._to_shard = to_shard

    def show(self) -> ShownCredentials:
        """What a call that begins now shows."""
        return self._security.show(self._session)

    def added(self, shown: ShownCredentials, metadata: Any) -> Metadata:
        """``metadata`` of a call with what it shows."""
        return (*(metadata or ()), *shown.metadata(to_shard=self._to_shard))

    def mark(self, failed: Any, shown: ShownCredentials) -> None:
        """Let ``failed``, a call or what it raised, explain a refusal: ``client_errors.translate`` asks it."""
        failed.explain = partial(self._explain, shown)

    def _explain(self, shown: ShownCredentials, error: PsError) -> PsError:
        return self._security.explain(error, shown, self._session)


class _Connection:
    """One channel of gRPC, and the calls that use it. Certificates of a client are fixed for its whole life."""

    def __init__(self, channel: Any, generation: int) -> None:
        self.channel = channel
        self.generation = generation
        self.calls = 0


class _Connections:
    """Of one channel: new calls use the files as they are, calls in progress keep their connection. Any thread."""

    def __init__(self, open_one: OpenOne, close_one: Callable[[Any], object], credentials: CallCredentials) -> None:
        self._open_one = open_one
        self._close_one = close_one
        self._lock = threading.Lock()
        shown = credentials.show()
        self.now = _Connection(open_one(shown), _generation(shown))
        self._before: list[_Connection] = []
        self._closed = False

    def take(self, shown: ShownCredentials) -> _Connection:
        """The connection for a call that begins and shows ``shown``; give it back when the call has ended."""
        with self._lock:
            # A thread that looked before another one did must not bring the older files back.
            if _generation(shown) > self.now.generation and not self._closed:
                self._before.append(self.now)
                self.now = _Connection(self._open_one(shown), _generation(shown))
            self.now.calls += 1
            idle = [each for each in self._before if not each.calls]
            self._before = [each for each in self._before if each.calls]
            taken = self.now
        for each in idle:
            self._close_one(each.channel)
        return taken

    def give_back(self, connection: _Connection) -> None:
        """A call has ended."""
        with self._lock:
            connection.calls -= 1

    def end(self) -> list[Any]:
        """The channels of all connections, to be closed; no other is opened."""
        with self._lock:
            self._closed = True
            return [each.channel for each in (*self._before, self.now)]


def _generation(shown: ShownCredentials) -> int:
    return shown.files.generation if shown.files else 0


class SecureChannel(grpc.Channel):
    """A blocking channel. New calls use the files as they are; calls in progress keep their connection. Any thread."""

    def __init__(self, open_one: OpenOne, credentials: CallCredentials) -> None:
        self.connections = _Connections(open_one, lambda channel: channel.close(), credentials)
        self.credentials = credentials

    def close(self) -> None:
        """Close every connection; calls in progress fail."""
        for channel in self.connections.end():
            channel.close()

    def __enter__(self) -> SecureChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def subscribe(self, callback: Any, try_to_connect: bool = False) -> None:
        """See grpc.Channel; of the present connection."""
        self.connections.now.channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        """See grpc.Channel."""
        self.connections.now.channel.unsubscribe(callback)

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        """See grpc.Channel."""
        return _Unary(self, "unary_unary", arguments, named)

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        """See grpc.Channel."""
        return _Streaming(self, "unary_stream", arguments, named)

    def stream_unary(self, *arguments: Any, **named: Any) -> Any:
        """See grpc.Channel."""
        return _Unary(self, "stream_unary", arguments, named)

    def stream_stream(self, *arguments: Any, **named: Any) -> Any:
        """See grpc.Channel."""
        return _Streaming(self, "stream_stream", arguments, named)


class _Method:
    """One method of a stub, on the connection of the files as they are."""

    def __init__(
        self, owner: SecureChannel | SecureAsyncChannel, kind: str, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        self._credentials = owner.credentials
        self._connections = owner.connections
        self._make: Callable[[Any], Any] = lambda channel: getattr(channel, kind)(*arguments, **named)
        self._made: tuple[_Connection | None, Any] = (None, None)

    def _on(self, connection: _Connection) -> Any:
        known, method = self._made
        if known is not connection:
            method = self._make(connection.channel)
            self._made = connection, method
        return method

    def _waited(self, way: str, request: Any, timeout: float | None, metadata: Any, options: Any) -> Any:
        """The result of a call that blocks, made by ``way`` of gRPC's method."""
        shown = self._credentials.show()
        connection = self._connections.take(shown)
        try:
            call = getattr(self._on(connection), way)
            return call(request, timeout, self._credentials.added(shown, metadata), **options)
        except grpc.RpcError as error:
            self._credentials.mark(error, shown)
            raise
        finally:
            self._connections.give_back(connection)

    def _begun(self, way: str, request: Any, timeout: float | None, metadata: Any, options: Any) -> Any:
        """A call that goes on, made by ``way`` of gRPC's method."""
        shown = self._credentials.show()
        connection = self._connections.take(shown)
        try:
            begin = getattr(self._on(connection), way)
            call = begin(request, timeout, self._credentials.added(shown, metadata), **options)
        except BaseException:
            self._connections.give_back(connection)
            raise
        self._credentials.mark(call, shown)
        if not call.add_callback(lambda: self._connections.give_back(connection)):
            self._connections.give_back(connection)  # it has ended already
        return call


class _Unary(_Method):
    def __call__(self, request: Any, timeout: float | None = None, metadata: Any = None, **options: Any) -> Any:
        return self._waited("__call__", request, timeout, metadata, options)

    def with_call(self, request: Any, timeout: float | None = None, metadata: Any = None, **options: Any) -> Any:
        return self._waited("with_call", request, timeout, metadata, options)

    def future(self, request: Any, timeout: float | None = None, metadata: Any = None, **options: Any) -> Any:
        return self._begun("future", request, timeout, metadata, options)


class _Streaming(_Method):
    def __call__(self, request: Any, timeout: float | None = None, metadata: Any = None, **options: Any) -> Any:
        return self._begun("__call__", request, timeout, metadata, options)


class SecureAsyncChannel(grpc.aio.Channel):
    """A channel for the running event loop; otherwise as SecureChannel."""

    def __init__(self, open_one: OpenOne, credentials: CallCredentials) -> None:
        self._closing: set[asyncio.Task[None]] = set()
        self.connections = _Connections(open_one, self._close_idle, credentials)
        self.credentials = credentials

    def _close_idle(self, channel: grpc.aio.Channel) -> None:
        task = asyncio.get_running_loop().create_task(channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def __aenter__(self) -> SecureAsyncChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Close every connection."""
        for channel in self.connections.end():
            await channel.close(grace)
        await asyncio.gather(*self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """See grpc.aio.Channel; of the present connection."""
        state: grpc.ChannelConnectivity = self.connections.now.channel.get_state(try_to_connect)
        return state

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See grpc.aio.Channel."""
        await self.connections.now.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """See grpc.aio.Channel."""
        await self.connections.now.channel.channel_ready()

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        """See grpc.aio.Channel. Its calls are coroutines."""
        return _AsyncUnary(self, "unary_unary", arguments, named)

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        """See grpc.aio.Channel."""
        return _AsyncStreaming(self, "unary_stream", arguments, named)

    def stream_unary(self, *arguments: Any, **named: Any) -> Any:
        """See grpc.aio.Channel. Its calls are coroutines."""
        return _AsyncUnary(self, "stream_unary", arguments, named)

    def stream_stream(self, *arguments: Any, **named: Any) -> Any:
        """See grpc.aio.Channel."""
        return _AsyncStreaming(self, "stream_stream", arguments, named)


class _AsyncUnary(_Method):
    async def __call__(self, *request: Any, metadata: Any = None, **options: Any) -> Any:
        shown = self._credentials.show()
        connection = self._connections.take(shown)
        try:
            call = self._on(connection)
            return await call(*request, metadata=self._credentials.added(shown, metadata), **options)
        except grpc.RpcError as error:
            self._credentials.mark(error, shown)
            raise
        finally:
            self._connections.give_back(connection)


class _AsyncStreaming(_Method):
    def __call__(self, *request: Any, metadata: Any = None, **options: Any) -> Any:
        shown = self._credentials.show()
        connection = self._connections.take(shown)
        try:
            begin = self._on(connection)
            call = begin(*request, metadata=self._credentials.added(shown, metadata), **options)
        except BaseException:
            self._connections.give_back(connection)
            raise
        call.add_done_callback(lambda _: self._connections.give_back(connection))
        return _MarkedCall(call, partial(self._credentials.mark, shown=shown))


class _MarkedCall:
    """A call of grpc.aio with a stream of answers; what ``read`` raises can explain a refusal."""

    def __init__(self, call: Any, mark: Callable[[Any], None]) -> None:
        self._call = call
        self._mark = mark

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    async def read(self) -> Any:
        """See grpc.aio."""
        try:
            return await self._call.read()
        except grpc.RpcError as error:
            self._mark(error)
            raise
