"""How a worker makes its steps, what it pushes in one, and what became of it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from ps_protocol.layout import Range
from ps_protocol.wire import RAW, Wire
from ps_worker.tables.update import RowUpdate


class Outcome(enum.IntEnum):
    """What a shard did with a push; the higher, the less of it went in. The values are ordered for ``max``."""

    APPLIED = 1
    #: Applied before, under the same sequence: the answer had been lost.
    DUPLICATE = 2
    #: sync: accepted, its step is still open.
    PENDING = 3
    #: Non-finite and skipped by policy.
    SKIPPED = 4
    #: async, ssp: above the staleness threshold, not applied.
    STALE = 5
    #: sync: its step was applied without it.
    LATE = 6
    #: Refused with an error.
    REFUSED = 7


class Writes(enum.Enum):
    """What ``cluster.optimizer`` does with values that the user sets between steps."""

    ASSIGN = "assign"
    REFUSE = "refuse"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class Style:
    """How a model's steps are made."""

    wire: Wire = RAW
    #: The exchange goes on while the next gradients are computed.
    overlap: bool = False
    writes: Writes = Writes.ASSIGN


PLAIN = Style()


@dataclass(frozen=True, slots=True)
class Update:
    """What a step brings, beside the gradients and buffers in memory."""

    #: Numbers of the variables without a gradient.
    absent: tuple[int, ...]
    #: JSON options of each parameter group.
    options: tuple[str, ...]
    with_buffers: bool = False
    #: Only the clock moves; no gradient is sent.
    skipped: bool = False
    #: The gradients have been looked at: there is no NaN or infinity in them.
    finite: bool = False
    #: The parameters that come back are used this many steps later than usual.
    ahead: int = 0
    #: Per shard, ranges of its region that have been sent already.
    staged: Sequence[Sequence[Range]] = ()
    #: Gradients of rows; None: no table took part.
    rows: RowUpdate | None = None
    #: JSON options of each table.
    table_options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Push:
    """One push as it goes to every shard."""

    sequence: int
    phase: int
    clock: int
    update: Update


@dataclass(frozen=True, slots=True)
class StepSummary:
    """What became of one step."""

    #: Version of the parameters received, by shard.
    versions: tuple[int, ...]
    #: What each shard did with the push.
    outcomes: tuple[Outcome, ...]
    #: The highest over the shards: version when applied minus version pulled.
    staleness: int
    #: This worker's clock after the step, within its phase.
    clock: int
    #: Gradients and parameters on the wire.
    transferred_bytes: int

    @property
    def outcome(self) -> Outcome:
        """The least favourable over the shards."""
        return max(self.outcomes)

    @property
    def version(self) -> int:
        """The lowest version received."""
        return min(self.versions)
