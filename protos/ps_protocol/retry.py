"""How long to wait before an attempt is repeated, and when to give up: the one rule of workers, servers and tools."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from ps_protocol.errors import NotReady, PsError, StorageFull, Unavailable


@dataclass(frozen=True, slots=True)
class Retry:
    """Pauses that double from ``first_seconds`` to ``longest_seconds``, for ``total_seconds``. Knows no clock.

    There is no jitter: a gRPC channel adds its own to the pauses before it connects again.
    """

    first_seconds: float
    longest_seconds: float
    total_seconds: float = math.inf

    def after(self, pause_seconds: float) -> float:
        """The pause that follows one of ``pause_seconds``; the first one follows 0."""
        return min(2 * pause_seconds, self.longest_seconds) or self.first_seconds

    def within(self, total_seconds: float) -> Retry:
        """The same pauses, for ``total_seconds``."""
        return replace(self, total_seconds=total_seconds)


SHARD = Retry(0.1, 2.0)
"""Calls and streams to a shard that is away, starting, or full."""

COORDINATOR = Retry(0.05, 1.0)
"""Calls to a coordinator that is away, or whose answer was lost."""

OTHERS = Retry(0.002, 0.1)
"""Questions whether other workers have done their part of something short."""

MOVE = Retry(0.2, 2.0, total_seconds=30.0)
"""A batch of slices that could not be moved; the total is about the time of a restart."""

CUT = Retry(0.1, 2.0)
"""A point of the job that its shards did not reach together: one may hear later than others that a worker has left."""

SCALING = Retry(1.0, 30.0)
"""A step of scaling that failed."""

RELAY = Retry(0.5, 30.0)
"""A version of published weights that a relay could not receive."""

WORKERS = Retry(60.0, 960.0)
"""Requests for workers that are still missing."""

RESTART = Retry(0.5, 10.0)
"""The start of a process that ends soon after each start, from the second time on."""


class Attempts:
    """The attempts of one thread or task during one outage, which begins now.

    The time begins again whenever a NotReady reports progress.
    """

    def __init__(self, retry: Retry) -> None:
        self._retry = retry
        self._deadline = time.monotonic() + retry.total_seconds
        self._pause_seconds = 0.0
        self._progress = 0

    @property
    def left_seconds(self) -> float:
        """Time until no attempt is made any more."""
        return max(0.0, self._deadline - time.monotonic())

    def pause_after(self, error: PsError) -> float | None:
        """Seconds to wait after ``error``. None: the time is over. The last pause ends with the time."""
        if isinstance(error, NotReady) and error.progress > self._progress:
            self._progress = error.progress
            self._deadline = time.monotonic() + self._retry.total_seconds
        if not (left := self.left_seconds):
            return None
        self._pause_seconds = self._retry.after(self._pause_seconds)
        return min(self._pause_seconds, left)

    def sleep_after(self, error: PsError) -> None:
        """Sleep before the next attempt.

        When the time is over, raises StorageFull if ``error`` is one, else Unavailable, with its shard and remedy.
        """
        pause = self.pause_after(error)
        if pause is None:
            kind = StorageFull if isinstance(error, StorageFull) else Unavailable
            raise kind(
                f"gave up after {self._retry.total_seconds:g} seconds: {error.message}",
                shard=error.shard,
                remedy=error.remedy,
            ) from error
        time.sleep(pause)
