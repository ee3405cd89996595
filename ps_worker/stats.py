"""Owns a worker's running statistics: totals and rates over the last seconds, told with each heartbeat."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from ps_protocol.view import MemberStats

_MARK_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class _Totals:
    at_seconds: float
    steps: int = 0
    samples: int = 0
    bytes: int = 0


class StatsWindow:
    """Counts steps, samples and bytes; rates are over the last ``window_seconds``.

    Not locked: its session calls it under one lock. ``now`` is a monotonic time in seconds that never goes back.
    """

    def __init__(self, window_seconds: float = 10.0) -> None:
        self._window_seconds = window_seconds
        self._totals = _Totals(0.0)
        #: Totals at past moments, oldest first; only the first may be older than the window.
        self._marks: deque[_Totals] = deque()
        self._staleness = 0

    def record_step(self, now: float, nbytes: int, staleness: int) -> None:
        """One push and pull of ``nbytes`` together, whose push had this staleness."""
        self._staleness = staleness
        self._add(now, replace(self._totals, steps=self._totals.steps + 1, bytes=self._totals.bytes + nbytes))

    def record_samples(self, now: float, samples: int) -> None:
        """Samples handed to the training loop."""
        self._add(now, replace(self._totals, samples=self._totals.samples + samples))

    def snapshot(self, now: float) -> MemberStats:
        """Totals, and rates per second; rates are 0 until there is a time to divide by."""
        self._forget(now)
        first = self._marks[0] if self._marks else self._totals
        # A mark from before a pause is older than the window; what followed it happened within the window.
        elapsed = min(now - first.at_seconds, self._window_seconds)
        per_second = 1.0 / elapsed if elapsed > 0 else 0.0
        return MemberStats(
            steps=self._totals.steps,
            samples=self._totals.samples,
            steps_per_second=(self._totals.steps - first.steps) * per_second,
            bytes_per_second=(self._totals.bytes - first.bytes) * per_second,
            samples_per_second=(self._totals.samples - first.samples) * per_second,
            staleness=self._staleness,
        )

    def _add(self, now: float, totals: _Totals) -> None:
        # The first event has no time before it to be divided by: it only starts the window.
        if not self._marks:
            self._marks.append(replace(totals, at_seconds=now))
        elif now - self._marks[-1].at_seconds >= _MARK_SECONDS:
            self._marks.append(replace(self._totals, at_seconds=now))
        self._totals = totals
        self._forget(now)

    def _forget(self, now: float) -> None:
        while len(self._marks) > 1 and now - self._marks[1].at_seconds >= self._window_seconds:
            self._marks.popleft()
