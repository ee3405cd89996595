"""Refuses calls beyond what a server does at a time, in all and for one host, before anything of them is read."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc

from ps_server.limits import CALLS, PEER_CALLS, LimitCounts, ServerLimits, SharedLimit, host_of
from ps_server.serving.rpc_errors import translated

Context = grpc.aio.ServicerContext[Any, Any]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]

_FLAGS = ("--max-calls", "--max-peer-calls")
_ALWAYS_OPEN = "/grpc.health."


class CallLimits(grpc.aio.ServerInterceptor):
    """The outermost interceptor of a server. Health checks are not counted: a full server is a healthy one."""

    def __init__(self, limits: ServerLimits, counts: LimitCounts) -> None:
        names = (CALLS, PEER_CALLS)
        self._calls = SharedLimit(limits.max_calls, limits.max_peer_calls, names, counts)

    @property
    def used(self) -> int:
        """Calls in progress."""
        return self._calls.used

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a call, counted from its beginning to its end."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_ALWAYS_OPEN):
            return handler
        kind = f"{_direction(handler.request_streaming)}_{_direction(handler.response_streaming)}"
        behavior = getattr(handler, kind)
        counted: Any = self._each(behavior) if inspect.isasyncgenfunction(behavior) else self._once(behavior)
        return handler._replace(**{kind: counted})

    @contextmanager
    def _taken(self, peer: str) -> Iterator[None]:
        try:
            yield
        finally:
            self._calls.give_back(peer)

    def _once(self, behavior: Callable[[Any, Context], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
        async def answer(request: Any, context: Context) -> Any:
            peer = await self._admitted(context)
            with self._taken(peer):
                return await behavior(request, context)

        return answer

    def _each(
        self, behavior: Callable[[Any, Context], AsyncGenerator[Any, None]]
    ) -> Callable[[Any, Context], AsyncIterator[Any]]:
        async def answer(request: Any, context: Context) -> AsyncIterator[Any]:
            peer = await self._admitted(context)
            with self._taken(peer):
                async with aclosing(behavior(request, context)) as replies:
                    async for reply in replies:
                        yield reply

        return answer

    async def _admitted(self, context: Context) -> str:
        """The peer, which has one call more. Ends the call where that is too many."""
        peer = host_of(context.peer())
        async with translated(context):
            self._calls.take(peer, "calls in progress", _FLAGS)
        return peer


def _direction(streams: bool) -> str:
    return "stream" if streams else "unary"
