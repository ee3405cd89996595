"""The declaration of a model: variables, parameter groups, consistency mode, and the shard map of its slices."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Self, TypeVar

from ps_protocol.errors import ConfigError, InvalidRequest, PsError
from ps_protocol.model.tables import TableSpec
from ps_protocol.text import whole_number

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


class StalePolicy(enum.Enum):
    """How async and ssp treat a push whose staleness is above the threshold."""

    ACCEPT = "accept"
    REJECT = "reject"
    SCALE = "scale"


WORKERS = "workers"
"""The threshold that is the number of live workers, as users write it."""


@dataclass(frozen=True, slots=True)
class StaleRule:
    """What async and ssp do with a push of a given staleness."""

    policy: StalePolicy = StalePolicy.ACCEPT
    #: The policy acts on a staleness above this.
    threshold: int = 0
    #: The threshold is the number of live workers.
    by_workers: bool = False

    @classmethod
    def of(cls, policy: str, threshold: int | str | None = None) -> Self:
        """From a name and a number, or "workers", as users write them; None: "workers".

        Raises ConfigError for an unknown name, and for a number with "accept", which has no threshold; InvalidRequest
        for a number out of range.
        """
        chosen = choice(StalePolicy, policy, "stale_policy")
        if isinstance(threshold, str) and threshold != WORKERS:
            raise ConfigError("unknown value for stale_threshold", expected=_THRESHOLDS, actual=repr(threshold)[:80])
        known = isinstance(threshold, int) and not isinstance(threshold, bool)
        if not isinstance(threshold, str | None) and not (known and 0 <= threshold <= _MOST_STALE):
            raise InvalidRequest("stale_threshold is out of range", expected=_THRESHOLDS, actual=repr(threshold)[:80])
        if chosen is StalePolicy.ACCEPT:
            if known:
                raise ConfigError(
                    "stale_threshold has no effect where every push is accepted",
                    expected="stale_policy='reject' or 'scale' with it",
                    actual=f"stale_policy='accept', stale_threshold={threshold}",
                    remedy="give a stale_policy, or leave stale_threshold out",
                )
            return cls()
        return cls(chosen, by_workers=True) if isinstance(threshold, str | None) else cls(chosen, threshold)

    @classmethod
    def parse(cls, text: str) -> Self:
        """From "accept", "scale", "scale:8", "scale:workers", "reject:8" and so on; alone: with "workers".

        Raises ConfigError.
        """
        policy, colon, threshold = text.partition(":") if isinstance(text, str) else (text, "", "")
        try:
            if colon and policy == StalePolicy.ACCEPT.value:
                raise ValueError("accept has no threshold")
            if not colon or threshold == WORKERS:
                return cls.of(policy)
            if (number := whole_number(threshold)) is None:
                raise ValueError("no number")
            return cls.of(policy, number)
        except (PsError, ValueError):
            raise ConfigError(
                "unknown rule for stale gradients",
                expected="'accept', 'scale' or 'reject'; with a threshold 'scale:workers' or 'reject:8'",
                actual=repr(text)[:80],
            ) from None

    def __str__(self) -> str:
        above = "the number of workers" if self.by_workers else self.threshold
        return "accept" if self.policy is StalePolicy.ACCEPT else f"{self.policy.value} above {above}"


_MOST_STALE = 1 << 48
_THRESHOLDS = f"a whole number from 0 to {_MOST_STALE}, or '{WORKERS}'"


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
    #: What async and ssp do with its stale pushes; None: as the mode of the job says.
    stale: StaleRule | None = None


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
    #: The threshold is the number of live workers.
    stale_by_workers: bool = False

    @classmethod
    def of(
        cls,
        mode: str,
        *,
        staleness: int | None = None,
        backup: int = 0,
        grace_seconds: float = 0.0,
        stale_policy: str = "accept",
        stale_threshold: int | str | None = None,
    ) -> Self:
        """From names, as users write them; ``staleness`` None: the default of the mode; see ``StaleRule.of``.

        Raises ConfigError for an unknown name, and for what has no effect in the mode; InvalidRequest for a negative
        number.
        """
        chosen, stale = choice(Mode, mode, "mode"), StaleRule.of(stale_policy, stale_threshold)
        bound = chosen.default_staleness if staleness is None else staleness
        counts = {"staleness": bound, "backup": backup, "grace_seconds": grace_seconds}
        for name, value in counts.items():
            if not value >= 0:
                raise InvalidRequest(f"{name} of a mode is negative", expected="a number from 0", actual=f"{value:g}")
        for name, given, has_effect in (
            ("staleness", staleness, chosen.takes_staleness),
            ("backup", backup, chosen.collects),
            ("grace_seconds", grace_seconds, backup > 0),
            ("stale_policy", stale.policy is not StalePolicy.ACCEPT and stale.policy.value, not chosen.collects),
        ):
            if given and not has_effect:
                raise ConfigError(
                    f"{name} has no effect in mode '{chosen.value}'"
                    + (" without backup" if chosen.collects and name == "grace_seconds" else ""),
                    actual=f"{name}={given!r}",
                    remedy=f"leave {name} out",
                )
        return cls(chosen, bound, backup, grace_seconds=grace_seconds).with_rule(stale)

    @property
    def stale(self) -> StaleRule:
        """What async and ssp do with stale pushes."""
        return StaleRule(self.stale_policy, self.stale_threshold, self.stale_by_workers)

    def with_rule(self, stale: StaleRule | None) -> Self:
        """Return this mode with another rule for stale pushes; None, or in sync, which has none: as it is."""
        if stale is None or self.mode.collects:
            return self
        return replace(
            self, stale_policy=stale.policy, stale_threshold=stale.threshold, stale_by_workers=stale.by_workers
        )

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
        policy = "" if self.stale_policy is StalePolicy.ACCEPT else f", {self.stale}"
        return self.mode.value + detail + policy
