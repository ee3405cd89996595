"""The settings of a model's steps, where a stream stands, the push of a step, and its result."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ps_protocol.cluster.answers import Outcome
from ps_protocol.errors import InvalidRequest, NonFiniteGradient, PsError
from ps_protocol.model.layout import Range
from ps_protocol.model.spec import Options
from ps_protocol.model.tables import RowOptions
from ps_protocol.tracing.tracer import TraceSpan
from ps_protocol.wire.formats import RAW, Wire
from ps_worker.host.leader import CombinedPush
from ps_worker.tables.row_payloads import RowUpdate


class Writes(enum.Enum):
    """What ``cluster.optimizer`` does with values that the user sets between steps."""

    ASSIGN = "assign"
    REFUSE = "refuse"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The settings of a model's steps."""

    wire: Wire = RAW
    #: Exchanges run while the next gradients are computed.
    overlap: bool = False
    writes: Writes = Writes.ASSIGN


PLAIN = StepSettings()


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """What a shard knows of this worker when its stream opens."""

    version: int
    #: (phase, clock) of this worker on the shard.
    position: tuple[int, int]
    last_sequence: int
    initialised: bool


@dataclass(slots=True)
class StepPush:
    """The push of one step, without the gradients and buffers in memory. Every shard gets its part.

    Completed by the model and its pipeline before it is sent, and not changed any more then.
    """

    #: Numbers of the variables without a gradient.
    absent: tuple[int, ...]
    #: Of each parameter group, the options that are not as declared.
    options: tuple[Options, ...]
    with_buffers: bool = False
    #: Only the clock moves; no gradient is sent.
    skipped: bool = False
    #: The gradients have been checked: they hold no NaN or infinity.
    finite: bool = False
    #: The parameters of the answer are used this many steps later than usual.
    ahead: int = 0
    #: Per shard, ranges of its region that have been sent already.
    staged: Sequence[Sequence[Range]] = ()
    #: Gradients of rows; None: no table took part.
    rows: RowUpdate | None = None
    #: Of each table, the options that are not as declared.
    table_options: tuple[RowOptions, ...] = ()
    #: Set by the pipeline, the same on every shard: the number of the push, and the position it moves this worker to.
    sequence: int = 0
    phase: int = 0
    clock: int = 0
    #: Before it is sent, samples of parameters on devices are compared, which the user may have set.
    looks_on_devices: bool = False
    #: The trace of the step; None: it is not traced.
    trace: TraceSpan | None = None
    #: sync: what the gradients weigh in the mean of their step; 0: 1.
    weight: float = 0.0
    #: Where gradients are clipped: their squared norm, with those of rows; None: they are not.
    squared_norm: float | None = None
    #: Made by this worker itself, although others of its host push together.
    alone: bool = False
    #: Of a push of several workers: called for each shard that does not take it, at once, for what goes there instead.
    apart: Callable[[], StepPush] | None = None
    #: What is sent in place of this worker's gradients, with those of others of its host; None: its own.
    combined: CombinedPush | None = None


@dataclass(frozen=True, slots=True)
class StepSummary:
    """The result of one step, over all shards."""

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
    #: The longest over the shards: how long the parameters waited for other workers.
    waited_seconds: float = 0.0
    #: Shards' refusals, and errors that the push's step failed with. An optimizer raises them.
    errors: tuple[PsError, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """The highest outcome over the shards."""
        return max(self.outcomes)

    @property
    def version(self) -> int:
        """The lowest version received."""
        return min(self.versions)


def checked_weight(weight: object) -> float:
    """``weight`` of a push as a number. Raises InvalidRequest unless it is positive and finite."""
    try:
        number = float(weight)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not 0.0 < number < math.inf:
        raise InvalidRequest(
            "step() has a weight that no mean can be taken with; nothing was sent",
            expected="a positive finite number, such as the number of samples in the batch",
            actual=repr(weight)[:80],
            remedy="make no step for a batch without samples",
        )
    return number


def nonfinite_gradient(variable: str) -> NonFiniteGradient:
    """The refusal of a step with NaN or infinity in the gradient of ``variable``."""
    return NonFiniteGradient(
        "a gradient holds NaN or infinity; nothing was sent",
        variable=variable,
        remedy='lower the learning rate, clip gradients, or pass nonfinite="skip" to cluster.optimizer',
    )
