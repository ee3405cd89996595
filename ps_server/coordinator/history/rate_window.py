"""By how much totals rise per second, over the last seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Totals:
    #: Time and total, oldest first; only the first may be older than the window.
    marks: deque[tuple[float, float]] = field(default_factory=deque)


class RateWindow(Generic[K]):
    """Called by its owner, with rising times in seconds."""

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._totals: dict[K, _Totals] = {}

    def take(self, key: K, at: float, total: float) -> None:
        """The total of ``key`` at this time; after one that has fallen, as by a restart, earlier ones are forgotten."""
        marks = self._totals.setdefault(key, _Totals()).marks
        if marks and total < marks[-1][1]:
            marks.clear()
        marks.append((at, total))
        while len(marks) > 2 and at - marks[1][0] >= self._window_seconds:
            marks.popleft()

    def keep(self, keys: Collection[K]) -> None:
        """Forget all others."""
        for key in self._totals.keys() - set(keys):
            del self._totals[key]

    def rate(self, key: K) -> float:
        """Per second; 0 before there is a time to divide by."""
        totals = self._totals.get(key)
        if totals is None or len(totals.marks) < 2:
            return 0.0
        marks = totals.marks
        (begin, first), (end, last) = marks[0], marks[-1]
        return (last - first) / (end - begin) if end > begin else 0.0
