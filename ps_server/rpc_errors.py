"""The server side's one translation of errors: what a handler raises becomes a gRPC status and a typed trailer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

import grpc

from ps_protocol.errors import ERROR_TRAILER, ConfigError, InternalError, InvalidRequest, PsError, to_detail
from ps_protocol.v1 import common_pb2 as pb
from ps_server.log_limit import LogLimit

logger = logging.getLogger(__name__)
logger.addFilter(LogLimit())

STATUS = MappingProxyType(
    {
        pb.ERROR_CODE_INTERNAL: grpc.StatusCode.INTERNAL,
        pb.ERROR_CODE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
        pb.ERROR_CODE_FENCED: grpc.StatusCode.ABORTED,
        pb.ERROR_CODE_MODEL_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
        pb.ERROR_CODE_UNKNOWN_MODEL: grpc.StatusCode.NOT_FOUND,
        pb.ERROR_CODE_UNKNOWN_SHARD: grpc.StatusCode.NOT_FOUND,
        pb.ERROR_CODE_INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
        pb.ERROR_CODE_NON_FINITE: grpc.StatusCode.INVALID_ARGUMENT,
        pb.ERROR_CODE_PROTOCOL_VERSION: grpc.StatusCode.FAILED_PRECONDITION,
        pb.ERROR_CODE_UNSUPPORTED_OPTIMIZER: grpc.StatusCode.INVALID_ARGUMENT,
        pb.ERROR_CODE_NOT_READY: grpc.StatusCode.UNAVAILABLE,
        pb.ERROR_CODE_STATE_LOST: grpc.StatusCode.DATA_LOSS,
        pb.ERROR_CODE_STORAGE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
        pb.ERROR_CODE_DAMAGED_DATA: grpc.StatusCode.DATA_LOSS,
        pb.ERROR_CODE_MODEL_MOVED: grpc.StatusCode.FAILED_PRECONDITION,
        pb.ERROR_CODE_TABLE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
        pb.ERROR_CODE_PLACE_TAKEN: grpc.StatusCode.ALREADY_EXISTS,
    }
)
"""Every error code's gRPC status. The code in the trailer is what clients act on."""

# gRPC drops calls whose trailers come near 8 KB; the texts stay well below, also percent- and base64-encoded.
_STATUS_TEXT_LENGTH = 250
_FIELD_BYTES = 2500
_DETAIL_BYTES = 4500


def _clipped(text: str, limit_bytes: int) -> str:
    data = text.encode()
    return text if len(data) <= limit_bytes else data[:limit_bytes].decode(errors="ignore") + " …"


def trailer(error: PsError) -> bytes:
    """The value of the error trailer: ``error`` with its texts cut to what gRPC lets through."""
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
        # The caller has gone, and nobody is to be told.
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
    except ConfigError as error:
        # A setting that came with the request.
        fields = {"expected": error.expected, "actual": error.actual, "remedy": error.remedy}
        await _abort(context, InvalidRequest(error.message, **fields))
    except PsError as error:
        await _abort(context, error)
    except Exception as error:
        # The edge of the process: nothing may leave it untyped.
        logger.exception("a request failed")
        await _abort(context, InternalError(f"{type(error).__name__}: {error}", remedy="see the log of the server"))
