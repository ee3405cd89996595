"""The error tree of both sides, each error with the code that it has on the wire.

``Retryable`` asks for patience, ``Refused`` for another request. The rest stands directly below ``PsError``: a process
has lost its place, state or files are lost or damaged, or torch-ps has a defect. docs/errors.md says what to do.
"""

from __future__ import annotations

import enum
from typing import ClassVar

ERROR_TRAILER = "ps-error-bin"


class ErrorCode(enum.IntEnum):
    """What a client acts on; the numbers are part of the wire and are never reused."""

    INTERNAL = 1
    UNAVAILABLE = 2
    FENCED = 3
    MODEL_MISMATCH = 4
    UNKNOWN_MODEL = 5
    UNKNOWN_SHARD = 6
    INVALID_REQUEST = 7
    NON_FINITE = 8
    PROTOCOL_VERSION = 9
    UNSUPPORTED_OPTIMIZER = 10
    NOT_READY = 11
    STATE_LOST = 12
    STORAGE_FULL = 13
    DAMAGED_DATA = 14
    MODEL_MOVED = 15
    TABLE_FULL = 16
    PLACE_TAKEN = 17
    UNAUTHENTICATED = 18
    PERMISSION_DENIED = 19
    MODEL_RELEASED = 20
    VERSION_GONE = 21
    UNKNOWN_VERSION = 22


class PsError(Exception):
    """Base of every error torch-ps raises.

    ``variable``, ``shard``, ``expected``, ``actual`` and ``remedy`` are empty where they do not apply.
    """

    code: ClassVar[ErrorCode] = ErrorCode.INTERNAL

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


class Retryable(PsError):
    """The same request may succeed later: nothing in it has to change. Never raised itself."""


class Refused(PsError):
    """The request, model or setting is refused, and nothing was changed. Never raised itself."""


class Unavailable(Retryable):
    """The other process cannot be reached, after the stated time of trying."""

    code = ErrorCode.UNAVAILABLE


class Fenced(PsError):
    """The process lost its place: its lease ended, or a newer incarnation took over."""

    code = ErrorCode.FENCED


class ModelMismatch(Refused):
    """A model differs from the one of the same name in this job, on a shard's disk, or in a checkpoint."""

    code = ErrorCode.MODEL_MISMATCH


class UnknownModel(Refused):
    """No model of this name has been declared."""

    code = ErrorCode.UNKNOWN_MODEL


class UnknownShard(Refused):
    """The cluster has no shard of this number."""

    code = ErrorCode.UNKNOWN_SHARD


class InvalidRequest(Refused):
    """A request breaks the protocol: wrong shape, dtype, size, order or value."""

    code = ErrorCode.INVALID_REQUEST


class NonFiniteGradient(Refused):
    """A gradient has NaN or infinity and the model's policy is to refuse it."""

    code = ErrorCode.NON_FINITE


class ProtocolVersionMismatch(Refused):
    """The two processes speak different versions of the protocol."""

    code = ErrorCode.PROTOCOL_VERSION


class UnsupportedOptimizer(Refused):
    """The optimizer, or one of its arguments, cannot run on shards; the message says why."""

    code = ErrorCode.UNSUPPORTED_OPTIMIZER


class NotReady(Retryable):
    """What is asked for is not there yet; trying again later is right.

    ``progress`` rises from one such error to the next while the awaited work advances; 0: unknown.
    """

    code = ErrorCode.NOT_READY

    def __init__(self, message: str, *, progress: int = 0, **named: str) -> None:
        super().__init__(message, **named)
        self.progress = progress


class StateLost(PsError):
    """A shard came back without its parameters, or a server of a script's own cluster ended with them."""

    code = ErrorCode.STATE_LOST


class StorageFull(Retryable):
    """A disk has no room. A push that meets it was not applied and may be repeated; a checkpoint leaves no trace."""

    code = ErrorCode.STORAGE_FULL


class DamagedData(PsError):
    """Files on disk are not what was written, not of this version or process, or do not have the rows that are due."""

    code = ErrorCode.DAMAGED_DATA


class ModelMoved(Refused):
    """A shard has another shard map of this model than the caller; ask the coordinator for the current one."""

    code = ErrorCode.MODEL_MOVED


class ModelReleased(Refused):
    """The model was released: the shards have dropped it, and its name may be that of another one."""

    code = ErrorCode.MODEL_RELEASED


class UnknownVersion(Refused):
    """The job has never published such a version: the number is too high, or it is one of another job."""

    code = ErrorCode.UNKNOWN_VERSION


class VersionGone(Refused):
    """A published version is not there any more: it was removed, or a shard that held a part of it has lost it."""

    code = ErrorCode.VERSION_GONE


class TableFull(Refused):
    """A table has as many rows as it may, and its policy is to refuse new ones; nothing was applied."""

    code = ErrorCode.TABLE_FULL


class PlaceTaken(Refused):
    """Another live process has this shard number or rank, or every rank of the job is taken."""

    code = ErrorCode.PLACE_TAKEN


class Unauthenticated(Refused):
    """A caller or server does not prove who it is: no token, an unknown one, or a certificate that is not accepted."""

    code = ErrorCode.UNAUTHENTICATED


class PermissionDenied(Refused):
    """The caller is known, and its role does not allow this call; the message names the roles that do."""

    code = ErrorCode.PERMISSION_DENIED


class ConfigError(Refused):
    """Flags, environment or arguments contradict each other or are incomplete. Never crosses the wire."""
