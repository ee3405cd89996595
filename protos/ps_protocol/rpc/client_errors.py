"""The client side's one translation of errors: a failed gRPC call becomes the error its trailer names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ps_protocol.errors import (
    ERROR_TRAILER,
    InternalError,
    InvalidRequest,
    ProtocolVersionMismatch,
    PsError,
    Unavailable,
)
from ps_protocol.text import printable
from ps_protocol.v1 import common_pb2 as pb
from ps_protocol.wire.convert.errors import from_detail

_UNREACHED = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})

_BROKEN = ("Stream removed", "RST_STREAM")
"""gRPC's words, with the status UNKNOWN or INTERNAL, where the other side has ended in the middle of a call
(grpc/grpc#34076)."""

_NOT_ACCEPTED = "CERTIFICATE_VERIFY_FAILED"

_UNRESOLVED = ("DNS resolution failed", "errors resolving", "Domain name not found")

_UNKNOWN_NAME = (
    "its name is not known on this host: correct it, or start that server with --advertise ADDRESS:PORT, an address "
    "under which others reach it"
)


def translate(error: grpc.RpcError, peer: str = "the server") -> PsError:
    """The typed error behind ``error``. ``peer`` names the other side, for messages about the connection.

    A call that failed on the way, without a trailer, becomes Unavailable. So does one whose credentials were refused
    where the process has newer ones by now (``Security.explain``).
    """
    found = _meaning(error, peer)
    explain: Callable[[PsError], PsError] | None = getattr(error, "explain", None)
    return explain(found) if explain else found


def is_answer(error: PsError) -> bool:
    """Whether the other side has answered with ``error``, which was raised from what ``translate`` was given."""
    cause = error.__cause__
    return isinstance(cause, grpc.RpcError) and hasattr(cause, "code") and _detail(cause) is not None


def _meaning(error: grpc.RpcError, peer: str) -> PsError:
    if not hasattr(error, "code"):
        return InternalError(f"call to {peer} failed: {error}")
    # grpc's failures are both RpcError and Call, which its types do not express.
    call: Any = error
    if (detail := _detail(call)) is not None:
        return from_detail(detail)
    status, text = call.code(), printable(call.details() or "")
    if _NOT_ACCEPTED in text:
        # It may be replaced while this process tries again. Where a person waits, ``why_unreachable`` finds out more.
        return Unavailable(
            f"the certificate of {peer} is not accepted here ({text})",
            remedy="correct --tls-ca or PS_TLS_CA here, or the certificate there",
        )
    if status in _UNREACHED or any(words in text for words in _BROKEN):
        return Unavailable(
            f"{peer} does not answer ({status.name}: {text})",
            # gRPC's words; it has no status of its own for this.
            remedy=_UNKNOWN_NAME
            if any(words in text for words in _UNRESOLVED)
            else "check that it runs, that the address is right, and that the network lets this through",
        )
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return InvalidRequest(
            f"{peer} does not take a message of this size ({text})",
            remedy="declare fewer variables in one model, or send less at a time",
        )
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return ProtocolVersionMismatch(
            f"{peer} does not know this call ({text})",
            remedy="use the same torch-ps on both sides, and check that the address is that of the right process",
        )
    return InternalError(f"call to {peer} failed with {status.name}: {text}", remedy="see the log of the server")


def _detail(call: Any) -> pb.ErrorDetail | None:
    for key, value in call.trailing_metadata() or ():
        if key == ERROR_TRAILER and isinstance(value, bytes):
            try:
                return pb.ErrorDetail.FromString(value)
            except DecodeError:
                return None
    return None
