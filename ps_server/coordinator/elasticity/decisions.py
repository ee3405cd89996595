"""What the policy sees of a job, and what it decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class JobLook:
    """A job at one moment, as far as the policy is concerned."""

    #: It trains: it has started and is not finished, and all shards are there.
    training: bool = True
    #: It does not train until workers that were lost are there again.
    waiting: bool = False
    #: By rank, the steps per second of each live worker; 0: it has not made any lately.
    speeds: Mapping[int, float] = field(default_factory=dict)
    #: By number, the bytes per second of each shard that holds something.
    traffic: Mapping[int, float] = field(default_factory=dict)
    #: By number, the pushes that wait for their turn at a shard, and their bytes; without an entry none do.
    queued_pushes: Mapping[int, float] = field(default_factory=dict)
    queued_bytes: Mapping[int, float] = field(default_factory=dict)
    #: Slices are being moved.
    moving: bool = False
    #: Ranks whose worker failed, was lost or was stopped, and was not replaced.
    lost: frozenset[int] = frozenset()
    #: Workers that have left after training: nobody is needed in their place.
    left: int = 0
    #: How many workers psctl scale has asked for, without those that have left; None: the job was not scaled.
    wanted: int | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision to report; ``reason`` says what and why, with the numbers."""

    reason: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Relieve(Decision):
    """Move ``part`` of what ``shard`` holds to shard ``to``."""

    shard: int = 0
    to: int = 0
    part: float = 0.0


@dataclass(frozen=True, slots=True)
class AskForWorkers(Decision):
    """Ask the engine for as many workers as bring the job to ``wanted``."""

    wanted: int = 0
    #: Ranks that are empty, as far as they are known.
    ranks: tuple[int, ...] = ()
