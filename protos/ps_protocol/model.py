"""What a model is to the cluster: its variables, its groups, and where their slices live."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ps_protocol.tables import TableSpec

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
"""Where variables begin: at a multiple of this. A line of the processor's cache, and enough for any vector kernel."""

PACKED_BYTES = 1
"""The alignment of models that were placed before variables were aligned: one begins where the one before it ends."""


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

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEM_BYTES[self.value]


class Kind(enum.Enum):
    """A parameter is updated by the optimizer; a buffer is written as it is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"


class NonFinite(enum.Enum):
    """What happens to a push that holds a NaN or an infinity."""

    REFUSE = "refuse"
    SKIP = "skip"
    ALLOW = "allow"


class Buffers(enum.Enum):
    """Whose buffers the shards keep."""

    RANK0 = "rank0"
    AVERAGE = "average"
    LOCAL = "local"


#: One argument of a torch.optim class: JSON's types. Numbers survive a round trip exactly.
Option = float | int | bool | str | None | list["Option"]
Options = Mapping[str, Option]


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
    """A model as its workers declare it. Two workers of one job must declare equal ones."""

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


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows [row_begin, row_end) of variable number ``variable``, on shard ``shard``."""

    variable: int
    row_begin: int
    row_end: int
    shard: int


@dataclass(frozen=True, slots=True)
class ShardMap:
    """Where every slice of one model lives. The order of slices is their order in the arenas."""

    #: Rises at every change.
    epoch: int
    spec: ModelSpec
    shards: int
    slices: tuple[Slice, ...]
    #: Folder of the checkpoint that its first values come from, as the shards see it; empty: from the first worker.
    restored_from: str = ""
    #: For each of the model's tables, the shard of each bucket.
    tables: tuple[tuple[int, ...], ...] = ()
    #: Every slice begins at a multiple of this: ALIGNMENT_BYTES, or PACKED_BYTES where an older version placed it.
    alignment_bytes: int = ALIGNMENT_BYTES

    def buckets(self, table: int, shard: int) -> list[int]:
        """The buckets of one table that live on ``shard``, rising."""
        return [bucket for bucket, owner in enumerate(self.tables[table]) if owner == shard]

    @property
    def holders(self) -> list[int]:
        """Shards that hold anything of the model, rising."""
        return sorted({piece.shard for piece in self.slices}.union(*self.tables))


class Mode(enum.Enum):
    """The three consistency modes."""

    ASYNC = "async"
    SSP = "ssp"
    SYNC = "sync"


class StalePolicy(enum.Enum):
    """What async and ssp do with a push whose staleness is above the threshold."""

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
    #: sync with backup: how long a step that could do without the missing pushes waits for them.
    grace_seconds: float = 0.0

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
