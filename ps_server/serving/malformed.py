"""Refuses requests whose bytes are not a message, with a typed error, few log lines and no traceback."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ps_protocol.errors import InvalidRequest
from ps_protocol.logs import EventLogger
from ps_server.serving.log_limit import LogLimit
from ps_server.serving.rpc_errors import translated

logger = EventLogger(__name__)
logging.getLogger(__name__).addFilter(LogLimit())

Context = grpc.aio.ServicerContext[Any, Any]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands for a request that could not be parsed."""

    error: InvalidRequest


class MalformedRequests(grpc.aio.ServerInterceptor):
    """Part of every server, installed by grpc_server.start; called on the server's loop at the start of each call.

    Left alone, gRPC answers such a request with UNKNOWN and logs a traceback. In a stream of requests the error is
    raised where the handler reads.
    """

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a call, with safe parsing of its requests."""
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        method, parse = handler_call_details.method, handler.request_deserializer
        if handler.request_streaming:
            return handler._replace(request_deserializer=_raising(parse, method))
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        behavior = getattr(handler, kind)
        careful: Any = _each(behavior) if inspect.isasyncgenfunction(behavior) else _once(behavior)
        return handler._replace(request_deserializer=_marking(parse, method), **{kind: careful})


def _raising(parse: Callable[[bytes], Any], method: str) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except (DecodeError, ValueError) as error:
            raise _error(method, data, error) from None

    return read


def _marking(parse: Callable[[bytes], Any], method: str) -> Callable[[bytes], Any]:
    """For a single request, which gRPC would parse outside of the handler, where an error cannot be answered."""
    careful = _raising(parse, method)

    def read(data: bytes) -> Any:
        try:
            return careful(data)
        except InvalidRequest as error:
            return _Malformed(error)

    return read


def _once(behavior: Callable[[Any, Context], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
    """For handlers that are coroutines: those with one reply, and those that write their replies to the context."""

    async def answer(request: Any, context: Context) -> Any:
        if isinstance(request, _Malformed):
            async with translated(context):
                raise _logged(request.error, context)
        return await behavior(request, context)

    return answer


def _each(
    behavior: Callable[[Any, Context], AsyncGenerator[Any, None]],
) -> Callable[[Any, Context], AsyncIterator[Any]]:
    async def answer(request: Any, context: Context) -> AsyncIterator[Any]:
        if isinstance(request, _Malformed):
            async with translated(context):
                raise _logged(request.error, context)
        async with aclosing(behavior(request, context)) as replies:
            async for reply in replies:
                yield reply

    return answer


def _error(method: str, data: bytes, error: Exception) -> InvalidRequest:
    return InvalidRequest(
        f"these bytes are no request of {method}",
        actual=f"{len(data)} bytes: {error}",
        remedy="use the same torch-ps on both sides",
    )


def _logged(error: InvalidRequest, context: Context) -> InvalidRequest:
    logger.warning("caller.refused", "refused a malformed request of %s: %s", context.peer(), error)
    return error
