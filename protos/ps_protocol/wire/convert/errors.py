"""Between errors and their form on the wire: a code and fields in a trailer, never a text to be parsed."""

from __future__ import annotations

from ps_protocol.errors import (
    DamagedData,
    ErrorCode,
    Fenced,
    InternalError,
    InvalidRequest,
    ModelMismatch,
    ModelMoved,
    ModelReleased,
    NonFiniteGradient,
    NotReady,
    PermissionDenied,
    PlaceTaken,
    ProtocolVersionMismatch,
    PsError,
    StateLost,
    StorageFull,
    TableFull,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    UnknownShard,
    UnknownVersion,
    UnsupportedOptimizer,
    VersionGone,
)
from ps_protocol.text import printable
from ps_protocol.v1 import common_pb2 as pb

by_code: dict[int, type[PsError]] = {
    cls.code: cls
    for cls in (
        InternalError,
        Unavailable,
        Fenced,
        ModelMismatch,
        UnknownModel,
        UnknownShard,
        InvalidRequest,
        NonFiniteGradient,
        ProtocolVersionMismatch,
        UnsupportedOptimizer,
        NotReady,
        StateLost,
        StorageFull,
        DamagedData,
        ModelMoved,
        TableFull,
        PlaceTaken,
        Unauthenticated,
        PermissionDenied,
        ModelReleased,
        VersionGone,
        UnknownVersion,
    )
}


_NUMBERS: dict[ErrorCode, pb.ErrorCode] = {code: getattr(pb, f"ERROR_CODE_{code.name}") for code in ErrorCode}


def to_detail(error: PsError) -> pb.ErrorDetail:
    """The wire form of ``error``."""
    return pb.ErrorDetail(
        code=_NUMBERS[error.code],
        message=error.message,
        variable=error.variable,
        shard=error.shard,
        expected=error.expected,
        actual=error.actual,
        remedy=error.remedy,
        progress=error.progress if isinstance(error, NotReady) else 0,
    )


def from_detail(detail: pb.ErrorDetail) -> PsError:
    """The exception ``detail`` stands for; a code this version does not know becomes InternalError."""
    error = by_code.get(detail.code, InternalError)(
        printable(detail.message, keep="\n"),
        variable=printable(detail.variable),
        shard=printable(detail.shard),
        expected=printable(detail.expected),
        actual=printable(detail.actual),
        remedy=printable(detail.remedy),
    )
    if isinstance(error, NotReady):
        error.progress = detail.progress
    return error
