"""Decides how much moves at one time, and how long training goes on between two batches: pure."""

from __future__ import annotations

from ps_server.coordinator import times

FIRST_BYTES = 8 << 20
LEAST_BYTES = 2 << 20
MOST_BYTES = 64 << 20


BREATH_PAUSES = 5
"""Training goes on so many pauses of the last batch more. Together a worker keeps about four fifths of its steps."""


_SAME = 0.8
"""A pause that is above this part of that of a batch four times as large does not depend on the size."""


class MovePace:
    """Of one move. Told the pause of each batch; a size that is given does not change."""

    def __init__(self, batch_bytes: int = 0) -> None:
        """``batch_bytes``: of every batch; 0: as much as the pauses allow."""
        self._given = bool(batch_bytes)
        self.batch_bytes = batch_bytes or FIRST_BYTES
        #: Of the first of the last batches, all of which were too long: its pause, and its size.
        self._too_long: tuple[float, int] | None = None
        self._pause = 0.0

    def paused(self, seconds: float) -> None:
        """A batch of ``batch_bytes`` has paused training for ``seconds``."""
        self._pause = seconds
        if self._given:
            return
        if seconds <= times.PAUSE_SECONDS:
            self._too_long = None
            if seconds < times.PAUSE_SECONDS / 2:
                self.batch_bytes = min(2 * self.batch_bytes, MOST_BYTES)
            return
        first, size_bytes = self._too_long = self._too_long or (seconds, self.batch_bytes)
        if 4 * self.batch_bytes <= size_bytes and seconds > _SAME * first:
            # Much smaller batches are no shorter. Where each takes a whole snapshot, few large ones are best.
            # A pause of a second is noticed, whatever its batch: the fewer there are, the better.
            self._given, self.batch_bytes = True, size_bytes if seconds < 1.0 else MOST_BYTES
        else:
            self.batch_bytes = max(self.batch_bytes // 2, LEAST_BYTES)

    @property
    def breath_seconds(self) -> float:
        """How long to wait before the next batch."""
        return times.BREATH_SECONDS + min(BREATH_PAUSES * self._pause, max(5.0, 2 * self._pause))
