"""What the coordinator knows of a job over time: curves, events, checkpoints, placement. For people who look at it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ps_protocol.cluster.view import ClusterStatus, JobEvent
from ps_protocol.cluster.weights import WeightsState


@dataclass(frozen=True, slots=True)
class Curve:
    """One number of the job over time; NaN where it was not known."""

    name: str
    #: Reported by the training script with ``cluster.report``.
    reported: bool
    #: One value for each point of ``Curves``: the mean, the least and the greatest of what the point stands for.
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True, slots=True)
class Curves:
    """Curves over common points of time."""

    #: When each point began, in seconds since 1970; ascending.
    times: Sequence[float] = ()
    curves: tuple[Curve, ...] = ()
    #: How long each point is, but for the last, which may still grow.
    point_seconds: float = 1.0
    #: Rises when points are merged: earlier points are then other ones.
    generation: int = 0

    def last(self, points: int) -> Curves:
        """The last ``points`` of every curve."""
        if points >= len(self.times):
            return self
        cut = slice(len(self.times) - points, None)
        curves = tuple(
            Curve(each.name, each.reported, each.mean[cut], each.low[cut], each.high[cut]) for each in self.curves
        )
        return Curves(self.times[cut], curves, self.point_seconds, self.generation)


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """A checkpoint that was written."""

    folder: str
    size_bytes: int
    #: How long it took.
    seconds: float
    #: When it was complete, in seconds since 1970.
    at_seconds: float
    #: The highest version of its models.
    step: int = 0
    #: Why it is kept beside the newest ones; empty: it is not.
    kept: str = ""


@dataclass(frozen=True, slots=True)
class PlacedVariable:
    """The amount that each shard has of a variable, or of a table."""

    model: str
    name: str
    #: Bytes of a variable, row buckets of a table; by shard.
    amounts: Mapping[int, int]
    table: bool = False
    #: How many variables this entry stands for; more than 1 for those that are too small to be named.
    count: int = 1


@dataclass(frozen=True, slots=True)
class JobHistory:
    """The job now, and how it came there."""

    status: ClusterStatus
    #: When this was sent, and when the history began; seconds since 1970.
    at_seconds: float
    began_seconds: float
    heartbeat_seconds: float = 1.0
    lease_seconds: float = 20.0
    curves: Curves = field(default_factory=Curves)
    #: The last ones, oldest first.
    events: tuple[JobEvent, ...] = ()
    checkpoints: tuple[CheckpointFacts, ...] = ()
    placement: tuple[PlacedVariable, ...] = ()
    #: Of the last seconds, the part that each rank spent waiting, by reason.
    wait_shares: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    #: Rows per second that each table grew by lately, by model and table.
    table_growth: Mapping[tuple[str, str], float] = field(default_factory=dict)
    #: The settings of the job, in words.
    configuration: Mapping[str, str] = field(default_factory=dict)
    #: Published weights: of each name the newest version that can be read, as one piece and without its
    #: metadata, and some readers.
    publications: tuple[WeightsState, ...] = ()
