"""The declaration of a model: variables, parameter groups, consistency mode, and the shard map of its slices."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self, TypeVar

from ps_protocol.errors import ConfigError, InvalidRequest
from ps_protocol.model.tables import TableSpec

E = TypeVar("E", bound=enum.Enum)

_ITEM_BYTES = MappingProxyType(
    {
        "float32": 4,
        "float64": 8,
        "float16": 2,
        "bfloat16": 2,
        "int64": 8,
        "int32": 4,
        "int16": 2,
        "int8": 1,
        "uint8": 1,
        "bool": 1,
    }
)


ALIGNMENT_BYTES = 64
"""Alignment of variables: a cache line, and enough for any vector kernel."""


def choice(kind: type[E], value: str, argument: str) -> E:
    """Return the member of ``kind`` that ``value`` names. Raises ConfigError, which lists the choices."""
    try:
        return kind(value)
    except ValueError:
        expected = ", ".join(repr(member.value) for member in kind)
        raise ConfigError(f"unknown value for {argument}", expected=expected, actual=repr(value)) from None


class DType(enum.Enum):
    """Element types; the values are the names torch gives them."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT8 = "uint8"
    BOOL = "bool"

    #: By identity, as members compare: that of Enum is written in Python, and steps look members up.
    __hash__ = object.__hash__

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEM_BYTES[self.value]


class Kind(enum.Enum):
    """A parameter is updated by the optimizer; a buffer is only overwritten."""

    PARAMETER = "parameter"
    BUFFER = "buffer"


class NonFinite(enum.Enum):
    """The treatment of a push with NaN or infinity."""

    REFUSE = "refuse"
    SKIP = "skip"
    ALLOW = "allow"


class Buffers(enum.Enum):
    """Which buffers the shards keep."""

    RANK0 = "rank0"
    AVERAGE = "average"
    LOCAL = "local"


#: One argument of a torch.optim class.
Option = float | int | bool | str | None | list["Option"]
Options = Mapping[str, Option]


@dataclass(frozen=True, slots=True)
class OptionDifference:
    """An option of a worker that is not used: in sync, a step uses the options of the lowest rank."""

    #: Number of the parameter group, or of the table.
    place: int
    is_table: bool
    name: str
    used_rank: int
    used: Option
    own: Option

    @property
    def key(self) -> tuple[int, bool, str, int]:
        """Identifies the difference, without the values, which change with every step of a schedule."""
        return self.place, self.is_table, self.name, self.used_rank


@dataclass(frozen=True, slots=True)
class Variable:
    """A named dense tensor. ``group`` is its optimizer parameter group (0 for buffers)."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    kind: Kind = Kind.PARAMETER
    group: int = 0

    @property
    def rows(self) -> int:
        """Length of axis 0; a scalar has one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_elements(self) -> int:
        """Elements of one row."""
        return math.prod(self.shape[1:])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.row_elements * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole variable."""
        return self.rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as workers declare it, equal on all workers of a job."""

    name: str
    #: Qualified name of a torch.optim class, such as "torch.optim.SGD".
    optimizer: str
    variables: tuple[Variable, ...]
    #: Per parameter group, the optimizer's arguments by name.
    group_options: tuple[Options, ...]
    nonfinite: NonFinite = NonFinite.REFUSE
    buffers: Buffers = Buffers.RANK0
    #: The optimizer reads shapes (Adafactor, Muon): variables are placed whole.
    unsplit: bool = False
    tables: tuple[TableSpec, ...] = ()
    #: Gradients of variables and rows together are scaled down to this norm; 0: they are not.
    clip_grad_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows [row_begin, row_end) of variable number ``variable``, on shard ``shard``."""

    variable: int
    row_begin: int
    row_end: int
    shard: int


@dataclass(frozen=True, slots=True)
class ShardMap:
    """The shard of every slice of one model. The order of slices is their order in the arenas."""

    #: Increased by every change.
    epoch: int
    spec: ModelSpec
    shards: int
    slices: tuple[Slice, ...]
    #: Folder of the checkpoint with the initial values, as a path for shards; empty: values of the first worker.
    restored_from: str = ""
    #: For each of the model's tables, the shard of each bucket.
    tables: tuple[tuple[int, ...], ...] = ()
    #: Every slice begins at a multiple of this.
    alignment_bytes: int = ALIGNMENT_BYTES

    def buckets(self, table: int, shard: int) -> list[int]:
        """The buckets of one table on ``shard``, ascending."""
        return [bucket for bucket, owner in enumerate(self.tables[table]) if owner == shard]

    @property
    def holders(self) -> list[int]:
        """Shards that have any part of the model, ascending."""
        return sorted({piece.shard for piece in self.slices}.union(*self.tables))


DEFAULT_STALENESS = 4
"""The default staleness bound of ssp."""


class Mode(enum.Enum):
    """The three consistency modes."""

    ASYNC = "async"
    SSP = "ssp"
    SYNC = "sync"

    #: By identity, as members compare: that of Enum is written in Python, and steps look members up.
    __hash__ = object.__hash__

    @property
    def default_staleness(self) -> int:
        """The default staleness bound; 0 in modes without one."""
        return DEFAULT_STALENESS if self.takes_staleness else 0

    @property
    def takes_staleness(self) -> bool:
        """Whether a staleness bound can be set."""
        return self is Mode.SSP

    @property
    def bounded(self) -> bool:
        """Whether a worker's steps may wait for those of others."""
        return self is not Mode.ASYNC

    @property
    def collects(self) -> bool:
        """Whether one step combines a push of every worker."""
        return self is Mode.SYNC


class StalePolicy(enum.Enum):
    """How async and ssp treat a push whose staleness is above the threshold."""

    ACCEPT = "accept"
    REJECT = "reject"
    SCALE = "scale"


@dataclass(frozen=True, slots=True)
class Consistency:
    """The consistency mode of a job; may be changed while it runs."""

    mode: Mode = Mode.ASYNC
    #: ssp: steps a worker may be ahead of the slowest live one.
    staleness: int = 0
    #: sync: pushes of a step that may be missing when it is applied.
    backup: int = 0
    stale_policy: StalePolicy = StalePolicy.ACCEPT
    stale_threshold: int = 0
    #: sync with backup: how long a step that could be applied waits for the missing pushes.
    grace_seconds: float = 0.0

    @classmethod
    def of(
        cls,
        mode: str,
        *,
        staleness: int | None = None,
        backup: int = 0,
        grace_seconds: float = 0.0,
        stale_policy: str = "accept",
        stale_threshold: int = 0,
    ) -> Self:
        """From names, as users write them; ``staleness`` None: the default of the mode.

        Raises ConfigError for an unknown name, InvalidRequest for a negative number.
        """
        chosen, policy = choice(Mode, mode, "mode"), choice(StalePolicy, stale_policy, "stale_policy")
        bound = chosen.default_staleness if staleness is None else staleness
        counts = {
            "staleness": bound,
            "backup": backup,
            "stale_threshold": stale_threshold,
            "grace_seconds": grace_seconds,
        }
        for name, value in counts.items():
            if not value >= 0:
                raise InvalidRequest(f"{name} of a mode is negative", expected="a number from 0", actual=f"{value:g}")
        return cls(chosen, bound, backup, policy, stale_threshold, grace_seconds)

    @property
    def bound(self) -> int:
        """In a bounded mode: steps a worker may be ahead of the slowest live one."""
        return self.staleness if self.mode.takes_staleness else 0

    @property
    def lookahead(self) -> int:
        """By how many steps parameters may be used later than usual: 1, or 0 if every step needs its own."""
        return int(not self.mode.bounded or self.bound > 0)

    @property
    def in_lockstep(self) -> bool:
        """Whether every step combines the pushes of all workers, none missing."""
        return self.mode.collects and not self.backup

    def __str__(self) -> str:
        grace = f", grace {self.grace_seconds:g} s" if self.grace_seconds else ""
        detail = {
            Mode.ASYNC: "",
            Mode.SSP: f"({self.staleness})",
            Mode.SYNC: f"(backup={self.backup}{grace})" if self.backup else "",
        }[self.mode]
        policy = (
            ""
            if self.stale_policy is StalePolicy.ACCEPT
            else f", {self.stale_policy.value} above {self.stale_threshold}"
        )
        return self.mode.value + detail + policy
