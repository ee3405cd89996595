"""Channels that show credentials with every call, and connect again when certificate files were replaced."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc

from ps_protocol.security.credentials import SessionCredential
from ps_protocol.security.security import Security

Metadata = tuple[tuple[str, str | bytes], ...]


class CallCredentials:
    """What the calls of one channel carry, as it is at the time of a call."""

    def __init__(self, security: Security, session: SessionCredential | None, to_shard: bool) -> None:
        self.security = security
        self._session = session
        self._to_shard = to_shard

    def added(self, metadata: Any) -> Metadata:
        """``metadata`` of a call with the credentials."""
        return (*(metadata or ()), *self.security.metadata(self._session, to_shard=self._to_shard))


class _Connection:
    """One channel of gRPC, and the calls that use it. Certificates of a client are fixed for its whole life."""

    def __init__(self, channel: grpc.Channel, generation: int) -> None:
        self.channel = channel
        self.generation = generation
        self.calls = 0


class SecureChannel(grpc.Channel):
    """A blocking channel. New calls use the files as they are; calls in progress keep their connection. Any thread."""

    def __init__(self, open_one: Callable[[], grpc.Channel], credentials: CallCredentials) -> None:
        self._open_one = open_one
        self._credentials = credentials
        self._lock = threading.Lock()
        self._now = _Connection(open_one(), credentials.security.generation)
        self._before: list[_Connection] = []
        self._closed = False

    def take(self) -> _Connection:
        """The connection for a call that begins; give it back when the call has ended."""
        generation = self._credentials.security.generation
        with self._lock:
            if generation != self._now.generation and not self._closed:
                self._before.append(self._now)
                self._now = _Connection(self._open_one(), generation)
            self._now.calls += 1
            idle = [each for each in self._before if not each.calls]
            self._before = [each for each in self._before if each.calls]
            taken = self._now
        for each in idle:
            each.channel.close()
        return taken

    def give_back(self, connection: _Connection) -> None:
        """A call has ended."""
        with self._lock:
            connection.calls -= 1

    def added(self, metadata: Any) -> Metadata:
        """``metadata`` of a call with the credentials."""
        return self._credentials.added(metadata)

    def close(self) -> None:
        """Close every connection; calls in progress fail."""
        with self._lock:
            self._closed = True
            every = [*self._before, self._now]
        for each in every:
            each.channel.close()

    def __enter__(self) -> SecureChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def subscribe(self, callback: Any, try_to_connect: bool = False) -> None:
        """See grpc.Channel; of the present connection."""
        self._now.channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        """See grpc.Channel."""
        self._now.channel.unsubscribe(callback)

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
    """One method of a stub, on whichever connection is the present one."""

    def __init__(self, owner: SecureChannel, kind: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._owner = owner
        self._make: Callable[[grpc.Channel], Any] = lambda channel: getattr(channel, kind)(*arguments, **named)
        self._made: tuple[_Connection | None, Any] = (None, None)

    def _on(self, connection: _Connection) -> Any:
        known, method = self._made
        if known is not connection:
            method = self._make(connection.channel)
            self._made = connection, method
        return method

    def _until_done(self, connection: _Connection, call: Any) -> Any:
        if not call.add_callback(lambda: self._owner.give_back(connection)):
            self._owner.give_back(connection)  # it has ended already
        return call


class _Unary(_Method):
    def __call__(self, request: Any, timeout: float | None = None, metadata: Any = None, **options: Any) -> Any:
        connection = self._owner.take()
        try:
            return self._on(connection)(request, timeout, self._owner.added(metadata), **options)
        finally:
            self._owner.give_back(connection)

    def with_call(self, request: Any, timeout: float | None = None, metadata: Any = None, **options: Any) -> Any:
        connection = self._owner.take()
        try:
            return self._on(connection).with_call(request, timeout, self._owner.added(metadata), **options)
        finally:
            self._owner.give_back(connection)

    def future(self, request: Any, timeout: float | None = None, metadata: Any = None, **options: Any) -> Any:
        connection = self._owner.take()
        try:
            call = self._on(connection).future(request, timeout, self._owner.added(metadata), **options)
        except BaseException:
            self._owner.give_back(connection)
            raise
        return self._until_done(connection, call)


class _Streaming(_Method):
    def __call__(self, request: Any, timeout: float | None = None, metadata: Any = None, **options: Any) -> Any:
        connection = self._owner.take()
        try:
            call = self._on(connection)(request, timeout, self._owner.added(metadata), **options)
        except BaseException:
            self._owner.give_back(connection)
            raise
        return self._until_done(connection, call)


class SecureAsyncChannel(grpc.aio.Channel):
    """A channel for the running event loop. It is opened for one piece of work: new files are for the next one."""

    def __init__(self, channel: grpc.aio.Channel, credentials: CallCredentials) -> None:
        self._channel = channel
        self._credentials = credentials

    async def __aenter__(self) -> SecureAsyncChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Close the connection."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """See grpc.aio.Channel."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See grpc.aio.Channel."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """See grpc.aio.Channel."""
        await self._channel.channel_ready()

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        """See grpc.aio.Channel."""
        return self._with_credentials(self._channel.unary_unary(*arguments, **named))

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        """See grpc.aio.Channel."""
        return self._with_credentials(self._channel.unary_stream(*arguments, **named))

    def stream_unary(self, *arguments: Any, **named: Any) -> Any:
        """See grpc.aio.Channel."""
        return self._with_credentials(self._channel.stream_unary(*arguments, **named))

    def stream_stream(self, *arguments: Any, **named: Any) -> Any:
        """See grpc.aio.Channel."""
        return self._with_credentials(self._channel.stream_stream(*arguments, **named))

    def _with_credentials(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, metadata: Any = None, **named: Any) -> Any:
            return method(*arguments, metadata=self._credentials.added(metadata), **named)

        return call
