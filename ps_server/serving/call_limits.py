"""Limits the calls in progress, in all and of one host, and the size of headers, before a request is read."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc

from ps_server.limits import CALLS, METADATA, PEER_CALLS, LimitCounts, OverLimit, ServerLimits, SharedLimit, host_of
from ps_server.serving.rpc_errors import translated

Context = grpc.aio.ServicerContext[Any, Any]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]

_FLAGS = ("--max-calls", "--max-peer-calls")
_ALWAYS_OPEN = "/grpc.health."

_FIELD_BYTES = 32
"""What HTTP/2 adds to the name and the value of a header, when its size is limited."""


class CallLimits(grpc.aio.ServerInterceptor):
    """The outermost interceptor of a server. Health checks are not counted: a full server is a healthy one."""

    def __init__(self, limits: ServerLimits, counts: LimitCounts) -> None:
        names = (CALLS, PEER_CALLS)
        self._calls = SharedLimit(limits.max_calls, limits.max_peer_calls, names, counts)
        self._max_metadata_bytes = limits.max_metadata_bytes
        self._counts = counts

    @property
    def used(self) -> int:
        """Calls in progress."""
        return self._calls.used

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a call, counted from its beginning to its end."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        free = handler_call_details.method.startswith(_ALWAYS_OPEN)
        kind = f"{_direction(handler.request_streaming)}_{_direction(handler.response_streaming)}"
        behavior = getattr(handler, kind)
        counted: Any = (
            self._each(behavior, free) if inspect.isasyncgenfunction(behavior) else self._once(behavior, free)
        )
        return handler._replace(**{kind: counted})

    @contextmanager
    def _taken(self, peer: str | None) -> Iterator[None]:
        try:
            yield
        finally:
            if peer is not None:
                self._calls.give_back(peer)

    def _once(
        self, behavior: Callable[[Any, Context], Awaitable[Any]], free: bool
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        async def answer(request: Any, context: Context) -> Any:
            peer = await self._admitted(context, free)
            with self._taken(peer):
                return await behavior(request, context)

        return answer

    def _each(
        self, behavior: Callable[[Any, Context], AsyncGenerator[Any, None]], free: bool
    ) -> Callable[[Any, Context], AsyncIterator[Any]]:
        async def answer(request: Any, context: Context) -> AsyncIterator[Any]:
            peer = await self._admitted(context, free)
            with self._taken(peer):
                async with aclosing(behavior(request, context)) as replies:
                    async for reply in replies:
                        yield reply

        return answer

    async def _admitted(self, context: Context, free: bool) -> str | None:
        """Count a call of its peer, and return the host; None for one that is ``free``. Ends a call above a limit."""
        peer = context.peer()
        if free:
            return None
        host = host_of(peer)
        async with translated(context):
            self._check_headers(context)
            self._calls.take(host, "calls in progress", _FLAGS)
        return host

    def _check_headers(self, context: Context) -> None:
        """Raises OverLimit."""
        headers = context.invocation_metadata() or ()
        size = sum(len(name) + len(value) + _FIELD_BYTES for name, value in headers)
        if size > self._max_metadata_bytes:
            self._counts.add(METADATA)
            raise OverLimit.of(
                METADATA,
                "the headers of a call are too large",
                expected=f"at most {self._max_metadata_bytes} bytes",
                actual=f"{size} bytes",
                remedy="send less, or start the server with a higher --max-metadata-bytes",
            )


def _direction(streams: bool) -> str:
    return "stream" if streams else "unary"
