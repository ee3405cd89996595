"""The error tree of both sides, and its one form on the wire: a code in a trailer, never a text to be parsed."""

from __future__ import annotations

from typing import ClassVar

from ps_protocol.text import printable
from ps_protocol.v1 import common_pb2 as pb

ERROR_TRAILER = "ps-error-bin"


class PsError(Exception):
    """Base of every error torch-ps raises.

    ``variable``, ``shard``, ``expected``, ``actual`` and ``remedy`` are empty where they do not apply.
    """

    code: ClassVar[pb.ErrorCode] = pb.ERROR_CODE_INTERNAL

    def __init__(
        self,
        message: str,
        *,
        variable: str = "",
        shard: str = "",
        expected: str = "",
        actual: str = "",
        remedy: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.variable = variable
        self.shard = shard
        self.expected = expected
        self.actual = actual
        self.remedy = remedy

    def __str__(self) -> str:
        parts = [self.message]
        named = ("variable", "shard", "expected", "actual", "remedy")
        parts += [f"{name}: {value}" for name in named if (value := getattr(self, name))]
        return "; ".join(parts)


class InternalError(PsError):
    """A defect of torch-ps itself."""


class Unavailable(PsError):
    """The other process cannot be reached, after the stated time of trying."""

    code = pb.ERROR_CODE_UNAVAILABLE


class Fenced(PsError):
    """The process lost its place: its lease ended, or a newer incarnation took over."""

    code = pb.ERROR_CODE_FENCED


class ModelMismatch(PsError):
    """A model differs from the one of the same name in this job, on a shard's disk, or in a checkpoint."""

    code = pb.ERROR_CODE_MODEL_MISMATCH


class UnknownModel(PsError):
    """No model of this name has been declared."""

    code = pb.ERROR_CODE_UNKNOWN_MODEL


class UnknownShard(PsError):
    """The cluster has no shard of this number."""

    code = pb.ERROR_CODE_UNKNOWN_SHARD


class InvalidRequest(PsError):
    """A request breaks the protocol: wrong shape, dtype, size, order or value."""

    code = pb.ERROR_CODE_INVALID_REQUEST


class NonFiniteGradient(PsError):
    """A gradient holds NaN or infinity and the model's policy is to refuse."""

    code = pb.ERROR_CODE_NON_FINITE


class ProtocolVersionMismatch(PsError):
    """The two processes speak different versions of the protocol."""

    code = pb.ERROR_CODE_PROTOCOL_VERSION


class UnsupportedOptimizer(PsError):
    """The optimizer, or one of its arguments, cannot run on shards; the message says why."""

    code = pb.ERROR_CODE_UNSUPPORTED_OPTIMIZER


class NotReady(PsError):
    """What is asked for is not there yet; trying again later is right.

    ``progress`` rises from one such error to the next as long as the awaited advances; 0: that is not known.
    """

    code = pb.ERROR_CODE_NOT_READY

    def __init__(self, message: str, *, progress: int = 0, **named: str) -> None:
        super().__init__(message, **named)
        self.progress = progress


class StateLost(PsError):
    """A shard came back without the parameters it held."""

    code = pb.ERROR_CODE_STATE_LOST


class StorageFull(PsError):
    """A disk has no room. A push that meets it was not applied and may be repeated; a checkpoint leaves no trace."""

    code = pb.ERROR_CODE_STORAGE_FULL


class DamagedData(PsError):
    """Files on disk are not what was written, or not of this version or process."""

    code = pb.ERROR_CODE_DAMAGED_DATA


class ModelMoved(PsError):
    """A shard holds this model by another shard map than the caller's; ask the coordinator for the one in force."""

    code = pb.ERROR_CODE_MODEL_MOVED


class TableFull(PsError):
    """A table has as many rows as it may, and its policy is to refuse new ones; nothing was applied."""

    code = pb.ERROR_CODE_TABLE_FULL


class PlaceTaken(PsError):
    """Another process holds this shard number or rank, and has been heard of; or every rank of the job is held."""

    code = pb.ERROR_CODE_PLACE_TAKEN


class ConfigError(PsError):
    """Flags, environment or arguments contradict each other or are incomplete. Never crosses the wire."""


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
    )
}


def to_detail(error: PsError) -> pb.ErrorDetail:
    """The wire form of ``error``."""
    return pb.ErrorDetail(
        code=error.code,
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
