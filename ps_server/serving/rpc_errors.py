"""Translates errors of handlers to gRPC statuses with a typed trailer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from ps_protocol.errors import ERROR_TRAILER, ConfigError, ErrorCode, InternalError, InvalidRequest, PsError
from ps_protocol.logs import EventLogger
from ps_protocol.wire.convert.errors import to_detail
from ps_server.serving.log_limit import LogLimit

M = TypeVar("M", bound=Message)

logger = EventLogger(__name__)
logging.getLogger(__name__).addFilter(LogLimit())

STATUS = MappingProxyType(
    {
        ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
        ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
        ErrorCode.FENCED: grpc.StatusCode.ABORTED,
        ErrorCode.MODEL_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
        ErrorCode.UNKNOWN_MODEL: grpc.StatusCode.NOT_FOUND,
        ErrorCode.UNKNOWN_SHARD: grpc.StatusCode.NOT_FOUND,
        ErrorCode.INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
        ErrorCode.NON_FINITE: grpc.StatusCode.INVALID_ARGUMENT,
        ErrorCode.PROTOCOL_VERSION: grpc.StatusCode.FAILED_PRECONDITION,
        ErrorCode.UNSUPPORTED_OPTIMIZER: grpc.StatusCode.INVALID_ARGUMENT,
        ErrorCode.NOT_READY: grpc.StatusCode.UNAVAILABLE,
        ErrorCode.STATE_LOST: grpc.StatusCode.DATA_LOSS,
        ErrorCode.STORAGE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
        ErrorCode.DAMAGED_DATA: grpc.StatusCode.DATA_LOSS,
        ErrorCode.MODEL_MOVED: grpc.StatusCode.FAILED_PRECONDITION,
        ErrorCode.TABLE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
        ErrorCode.PLACE_TAKEN: grpc.StatusCode.ALREADY_EXISTS,
        ErrorCode.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
        ErrorCode.MODEL_RELEASED: grpc.StatusCode.NOT_FOUND,
        ErrorCode.VERSION_GONE: grpc.StatusCode.NOT_FOUND,
        ErrorCode.UNKNOWN_VERSION: grpc.StatusCode.NOT_FOUND,
        ErrorCode.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    }
)
"""The gRPC status of every error code. Clients use the code in the trailer."""

# gRPC drops calls whose trailers come near 8 KB; the texts stay well below, also percent- and base64-encoded.
_STATUS_TEXT_LENGTH = 250
_FIELD_BYTES = 2500
_DETAIL_BYTES = 4500


def _clipped(text: str, limit_bytes: int) -> str:
    data = text.encode()
    return text if len(data) <= limit_bytes else data[:limit_bytes].decode(errors="ignore") + " …"


def trailer(error: PsError) -> bytes:
    """The value of the error trailer: ``error`` with its texts shortened to the limit of gRPC."""
    detail = to_detail(error)
    left = _DETAIL_BYTES
    for name in ("message", "remedy", "expected", "actual", "variable", "shard"):
        text = _clipped(getattr(detail, name), max(0, min(left, _FIELD_BYTES)))
        setattr(detail, name, text)
        left -= len(text.encode())
    return detail.SerializeToString()


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: PsError) -> None:
    text = str(error)
    short = text if len(text) <= _STATUS_TEXT_LENGTH else text[:_STATUS_TEXT_LENGTH] + " …"
    try:
        await context.abort(STATUS[error.code], short, ((ERROR_TRAILER, trailer(error)),))
    except grpc.aio.InternalError:
        # The caller has ended the call.
        raise asyncio.CancelledError from None


@asynccontextmanager
async def translated(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Wrap the body of an aio handler, unary or streaming: ``async with rpc_errors.translated(context): …``.

    A PsError ends the call with its status and trailer. Any other exception is a defect: it is logged with its
    traceback, the same one not too often, and reaches the client as InternalError. Cancellation passes through.
    """
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except grpc.aio.InternalError:
        # A message was sent to a caller that has ended the call.
        raise asyncio.CancelledError from None
    except ConfigError as error:
        # A setting in the request.
        fields = {"expected": error.expected, "actual": error.actual, "remedy": error.remedy}
        await _abort(context, InvalidRequest(error.message, **fields))
    except PsError as error:
        await _abort(context, error)
    except Exception as error:
        # At the edge of the process every error is typed.
        logger.exception("request.failed", "a request failed")
        await _abort(context, InternalError(f"{type(error).__name__}: {error}", remedy="see the log of the server"))


def parsed(kind: type[M], data: bytes) -> M:
    """The message in ``data``. Raises InvalidRequest for bytes that are no ``kind``."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"a message is not a {kind.__name__}", actual=f"{len(data)} bytes") from error
