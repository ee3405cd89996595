"""The declaration of a table: width of rows, initial values, row optimizer, admission and expiry."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import InvalidRequest, UnsupportedOptimizer
from ps_protocol.model.row_optimizers import ROW_OPTIMIZERS

Ids = npt.NDArray[np.int64]

MAX_BUCKETS = 1 << 16
MAX_DIM = 1 << 14
DEFAULT_BUCKETS = 256
MOST_BYTES = 1 << 63
"""Sizes are below this."""
MAX_ROWS_BYTES = 1 << 30
"""Ids and rows that one message may bring or ask for."""
#: Limit of initial values; the difference of two is a float32.
_LARGEST_VALUE = 1e38


class Eviction(enum.Enum):
    """The treatment of new rows in a full table."""

    REFUSE = "refuse"
    LRU = "lru"
    LFU = "lfu"


@dataclass(frozen=True, slots=True)
class RowInit:
    """The initial values of rows: a function of (seed, table, id) alone."""

    #: "uniform" in [low, high), "normal" with mean ``low`` and standard deviation ``high``, "constant" ``low``.
    kind: str
    low: float = 0.0
    high: float = 0.0


@dataclass(frozen=True, slots=True)
class RowLife:
    """Admission and removal of rows. A use is a push that contains the id; a lookup is not a use."""

    #: An id gets a row at its n-th use; 0 and 1: at the first.
    admit_after: int = 0
    #: Each use gives it a row with this probability; 0: always.
    admit_probability: float = 0.0
    #: Rows are removed that were not used in this many updates of the table; 0: never.
    expire_after_updates: int = 0
    #: Rows are removed that were not used for this long; 0: never.
    expire_after_seconds: float = 0.0
    #: The most rows of the whole table, each bucket with its share; 0: as many as fit into memory.
    max_rows: int = 0
    eviction: Eviction = Eviction.REFUSE
    #: Memory of the whole table, of which each bucket has its share: the other rows are on disk. 0: all rows are in
    #: memory, unless the shard has a limit.
    memory_bytes: int = 0

    @property
    def counts_uses(self) -> bool:
        """Whether the uses of each row are counted."""
        return bool(self.max_rows) and self.eviction is Eviction.LFU


class RowCount(NamedTuple):
    """The number of rows of one table in a message."""

    #: Number of the table in its model.
    table: int
    rows: int


#: One argument of a row optimizer.
RowOptions = Mapping[str, float]

_NONE: RowOptions = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A table as its workers declare it: float32 rows of ``dim`` numbers by int64 id, of any value."""

    name: str
    dim: int
    seed: int
    init: RowInit
    optimizer: str
    #: Every argument of the optimizer.
    options: RowOptions = field(default_factory=lambda: _NONE)
    life: RowLife = RowLife()
    #: Number of buckets of ids, a power of two. A bucket is the unit of placement.
    buckets: int = DEFAULT_BUCKETS

    @property
    def state_width(self) -> int:
        """Numbers of optimizer state per row."""
        return sum(each.width(self.dim) for each in ROW_OPTIMIZERS[self.optimizer].state)

    @property
    def width(self) -> int:
        """Numbers of a row with its state."""
        return self.dim + self.state_width


def size_in_bytes(size: int | str) -> int:
    """A number of bytes: digits, and perhaps KB, MB, GB or TB, powers of 1,024. Raises InvalidRequest."""
    if isinstance(size, int):
        number: float = size
    else:
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)i?B?", str(size), re.IGNORECASE | re.ASCII)
        # Of too many digits it is infinite.
        number = float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " ") if found else -1.0
    if not 0 <= number < MOST_BYTES:
        # An int may have more digits than Python prints.
        is_long = isinstance(size, int) and size.bit_length() > 64
        actual = "an int of more than 64 bits" if is_long else repr(size)[:100]
        raise InvalidRequest("no number of bytes", expected="such as 512MB or 4GB, below 2**63", actual=actual)
    return int(number)


def validate(spec: TableSpec) -> None:
    """Raises InvalidRequest or UnsupportedOptimizer for an invalid table."""
    life = spec.life
    checks = (
        (spec.name != "", "name", "a name", repr(spec.name)),
        (1 <= spec.dim <= MAX_DIM, "dim", f"1 to {MAX_DIM}", spec.dim),
        (
            1 <= spec.buckets <= MAX_BUCKETS and spec.buckets & (spec.buckets - 1) == 0,
            "buckets",
            f"a power of two, at most {MAX_BUCKETS}",
            spec.buckets,
        ),
        (0 <= spec.seed < 1 << 64, "seed", "0 to 2**64 - 1", spec.seed),
        (spec.init.kind in ("uniform", "normal", "constant"), "init", "uniform, normal or constant", spec.init.kind),
        (
            abs(spec.init.low) <= _LARGEST_VALUE and abs(spec.init.high) <= _LARGEST_VALUE,
            "init",
            f"numbers between -{_LARGEST_VALUE:g} and {_LARGEST_VALUE:g}",
            spec.init,
        ),
        (spec.init.kind != "uniform" or spec.init.low <= spec.init.high, "init", "low <= high", spec.init),
        (spec.init.kind != "normal" or spec.init.high >= 0, "init", "a standard deviation >= 0", spec.init.high),
        (0 <= life.admit_after < 1 << 63, "admit_after", "0 or more, below 2**63", life.admit_after),
        (0 <= life.admit_probability <= 1, "admit_probability", "0 to 1", life.admit_probability),
        (
            not (life.admit_probability and life.admit_after > 1),
            "admit_probability",
            "one of admit_after and admit_probability",
            "both",
        ),
        (
            0 <= life.expire_after_updates < 1 << 63,
            "expire_after_updates",
            "0 or more, below 2**63",
            life.expire_after_updates,
        ),
        (
            0 <= life.expire_after_seconds < math.inf,
            "expire_after_seconds",
            "0 or more, finite",
            life.expire_after_seconds,
        ),
        (0 <= life.memory_bytes < MOST_BYTES, "memory", "0 or more bytes, below 2**63", life.memory_bytes),
        (
            life.max_rows == 0 or spec.buckets <= life.max_rows < 1 << 63,
            "max_rows",
            "0, or as many as buckets, below 2**63",
            life.max_rows,
        ),
    )
    for fine, what, expected, actual in checks:
        if not fine:
            raise InvalidRequest(
                f"table '{spec.name}' has {'an' if what == 'init' else 'a'} {what} that cannot be",
                variable=spec.name,
                expected=str(expected),
                actual=str(actual),
            )
    validate_options(spec, spec.options)


def validate_options(spec: TableSpec, options: RowOptions) -> None:
    """Raises UnsupportedOptimizer unless ``options`` are all arguments of the table's optimizer, with sane values."""
    if spec.optimizer not in ROW_OPTIMIZERS:
        raise UnsupportedOptimizer(
            f"table '{spec.name}' has a row optimizer that shards do not run",
            variable=spec.name,
            expected=", ".join(ROW_OPTIMIZERS),
            actual=spec.optimizer,
        )
    optimizer = ROW_OPTIMIZERS[spec.optimizer]
    known, ranges = optimizer.defaults(), optimizer.ranges()
    wrong = [name for name, value in options.items() if name not in known or not _fits(value, *ranges[name])]
    wrong += [name for name in known if name not in options]
    if wrong:
        described = (f"{name} ({low:g} to {high:.9g}, default {known[name]:g})" for name, (low, high) in ranges.items())
        raise UnsupportedOptimizer(
            f"table '{spec.name}': the arguments of row optimizer '{spec.optimizer}' are wrong: {', '.join(wrong)}",
            variable=spec.name,
            expected=", ".join(described),
            actual=", ".join(f"{name}={value!r}" for name, value in options.items()) or "none",
        )


def _fits(value: float, low: float, high: float) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and low <= value <= high
