"""Decides how large a lease is, so that workers of different speed come to the end of an epoch together: pure.

Far from the end a lease is what was asked for. Then it is half of what the worker can train until all of the epoch
could be trained: weighted factoring (Hummel, Schmidt, Uma and Wein, "Load-sharing in heterogeneous systems via weighted
factoring", SPAA 1996), after guided self-scheduling (Polychronopoulos and Kuck, 1987). The last batches are leased one
by one, and a worker gets one only if the others could not train all that is free before this worker is done with it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

PART = 0.5
"""A lease is at most this part of what its holder can still train in this epoch."""

UNKNOWN_PART = 8
"""A worker whose speed is not known gets this part of what it asks for, as a divisor."""

_LEAST_SPEED = 1e-9
"""Items per second that a worker is taken to train at least: times are divided by speeds."""

_KEPT = 0.75
"""What a measured speed keeps of its past with each report."""


@dataclass(slots=True)
class Pace:
    """How fast one worker trains the items of one dataset. Times are seconds of any steady clock."""

    items: float = 0.0
    seconds: float = 0.0
    #: Since when the present work is not counted: the last report, or the lease after a time without any; None: before
    #: the first of these.
    since: float | None = None

    def leased(self, now: float, *, had_none: bool) -> None:
        """The worker gets a lease; time without any is not work."""
        if had_none:
            self.since = now

    def reported(self, items: int, now: float) -> None:
        """The worker has trained ``items`` since its last report."""
        if self.since is None:
            self.since = now
            return
        self.items = _KEPT * self.items + items
        self.seconds = _KEPT * self.seconds + max(0.0, now - self.since)
        self.since = now

    def worker(self, held: int, now: float) -> PacedWorker:
        """The worker, which holds ``held`` items, as it is now."""
        elapsed = 0.0 if self.since is None else max(0.0, now - self.since)
        speed = self.items / self.seconds if self.seconds > 0.0 else None
        if speed is not None and held and speed * elapsed > held:
            # It should have reported them: a worker that stands still becomes slower by the time that passes.
            speed = held / elapsed
        return PacedWorker(held, 0.0 if speed is None else min(float(held), speed * elapsed), speed)


@dataclass(frozen=True, slots=True)
class PacedWorker:
    """A worker with its part of an epoch."""

    #: Items leased to it and not reported yet.
    held: int
    #: About how many of these it has trained.
    begun: float = 0.0
    #: Items per second; None: not known yet.
    speed: float | None = None

    @property
    def left(self) -> float:
        """Items that it has to train, about."""
        return self.held - self.begun


def lease_size(asked: int, batch: int, free: int, worker: PacedWorker, others: Collection[PacedWorker]) -> int:
    """How many of ``free`` items ``worker`` gets; 0: none now, since ``others`` end sooner without it.

    ``asked``: the most it wants. Leases are whole batches of ``batch`` items, but for the last one. ``others``: those
    that hold something. Without any, who asks gets something.
    """
    if batch < 1 or free < 1:
        return min(asked, free)
    known = [each.speed for each in (worker, *others) if each.speed is not None]
    usual = math.fsum(known) / len(known) if known else 1.0
    speed = _speed(worker, usual)
    most = asked if worker.speed is not None else max(batch, asked // UNKNOWN_PART)
    left = free + worker.left + math.fsum(other.left for other in others)
    together = speed + math.fsum(_speed(other, usual) for other in others)
    part = PART * (left * speed / together - worker.left)
    size = int(min(most, part, free) // batch) * batch
    if size > batch:
        return size
    done_after = (worker.left + batch) / speed
    if _trained_before(done_after, free, batch, others, usual):
        return 0
    return min(batch, asked, free)


def _speed(worker: PacedWorker, usual: float) -> float:
    return max(_LEAST_SPEED, usual if worker.speed is None else worker.speed)


def _trained_before(seconds: float, free: int, batch: int, others: Collection[PacedWorker], usual: float) -> bool:
    """Whether ``others`` could train what they hold and all ``free`` items within less than ``seconds``."""
    for other in others:
        room = (_speed(other, usual) * seconds - other.left) / batch
        # Of batches that end at the same time as this worker's own, none counts.
        free -= max(0, math.ceil(room - 1e-9) - 1) * batch
        if free <= 0:
            return True
    return False
