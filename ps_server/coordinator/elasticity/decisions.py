"""The input and the decisions of the elasticity policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class JobLook:
    """The state of a job at one moment, as the policy needs it."""

    #: Whether it trains: it has started and is not finished, and no shard is missing.
    training: bool = True
    #: Whether it waits for lost workers to return.
    waiting: bool = False
    #: By rank, the steps per second of each live worker; 0: none lately.
    speeds: Mapping[int, float] = field(default_factory=dict)
    #: By number, the bytes per second of each shard that has slices or buckets.
    traffic: Mapping[int, float] = field(default_factory=dict)
    #: By number, the pushes queued at a shard, and their bytes; no entry: none.
    queued_pushes: Mapping[int, float] = field(default_factory=dict)
    queued_bytes: Mapping[int, float] = field(default_factory=dict)
    #: Whether slices are being moved.
    moving: bool = False
    #: Ranks whose worker failed, was lost or was stopped, and was not replaced.
    lost: frozenset[int] = frozenset()
    #: Workers that have left after training: they need no replacement.
    left: int = 0
    #: The number of workers requested by psctl scale, without those that have left; None: the job was not scaled.
    wanted: int | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision to report; ``reason`` describes it, with the numbers."""

    reason: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Relieve(Decision):
    """Move ``part`` of the contents of ``shard`` to shard ``to``."""

    shard: int = 0
    to: int = 0
    part: float = 0.0


@dataclass(frozen=True, slots=True)
class AskForWorkers(Decision):
    """Request the workers that bring the job to ``wanted`` from the engine."""

    wanted: int = 0
    #: Vacant ranks, as far as known.
    ranks: tuple[int, ...] = ()
