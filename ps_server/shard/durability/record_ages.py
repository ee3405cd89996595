"""How long ago the records of a log were written, from samples of its last number: nothing is done for each record."""

from __future__ import annotations

from bisect import bisect_left

_MOST_SAMPLES = 1024

_PART = 0.02
"""Of their age: what lies between two samples at least that are kept when there are too many."""


class RecordAges:
    """Owned by ``Storage``, on the shard's event loop. Times are those of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        #: The log's last record at each of ``_times``; both rise.
        self._numbers: list[int] = []
        self._times: list[float] = []

    def sample(self, number: int, now: float) -> None:
        """The last record of the log is ``number``. A number below the sample before is that of a new log."""
        if self._numbers and number < self._numbers[-1]:
            self._numbers.clear()
            self._times.clear()
        if self._numbers and number == self._numbers[-1]:
            return
        self._numbers.append(number)
        self._times.append(now)
        if len(self._numbers) > _MOST_SAMPLES:
            self._thin(now)

    def forget(self, through: int) -> None:
        """Nobody will ask for the ages of records up to ``through``."""
        found = bisect_left(self._numbers, through)
        del self._numbers[:found], self._times[:found]

    def age_seconds(self, number: int, now: float) -> float:
        """For how long record ``number`` has been there at least; 0 for one that came after the last sample."""
        found = bisect_left(self._numbers, number)
        return max(0.0, now - self._times[found]) if found < len(self._times) else 0.0

    def _thin(self, now: float) -> None:
        """Keep fewer samples the older they are: an age is then short of the truth by a part of itself."""
        kept = [len(self._times) - 1]
        for i in range(kept[0] - 1, 0, -1):
            if self._times[kept[-1]] - self._times[i] >= _PART * (now - self._times[i]):
                kept.append(i)
        kept = [0, *reversed(kept)]
        self._numbers = [self._numbers[i] for i in kept]
        self._times = [self._times[i] for i in kept]
