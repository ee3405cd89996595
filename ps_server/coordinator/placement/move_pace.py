"""Decides how much moves at one time, and how long training goes on between two batches: pure."""

from __future__ import annotations

PAUSE_SECONDS = 0.12
"""What one batch should pause training for, at most."""

FIRST_BYTES = 16 << 20
LEAST_BYTES = 4 << 20
MOST_BYTES = 64 << 20

BREATH_SECONDS = 0.3
"""The time for training between two batches, at least."""

BREATH_PAUSES = 7
"""The same, in pauses of the last batch: a worker loses about two of them with each, and keeps four fifths."""

_LONGEST_BREATH_SECONDS = 5.0

_SAME = 0.8
"""A pause that is above this part of that of a batch twice as large does not depend on the size."""


class MovePace:
    """Of one move. Told the pause of each batch; a size that is given does not change."""

    def __init__(self, batch_bytes: int = 0) -> None:
        """``batch_bytes``: of every batch; 0: as much as the pauses allow."""
        self._given = bool(batch_bytes)
        self.batch_bytes = batch_bytes or FIRST_BYTES
        #: Of the last batch that was too long, and its size.
        self._too_long = 0.0
        self._pause = 0.0

    def paused(self, seconds: float) -> None:
        """A batch of ``batch_bytes`` has paused training for ``seconds``."""
        self._pause = seconds
        if self._given:
            return
        if seconds < PAUSE_SECONDS / 2:
            self.batch_bytes, self._too_long = min(2 * self.batch_bytes, MOST_BYTES), 0.0
        elif seconds > PAUSE_SECONDS and self._too_long and seconds > _SAME * self._too_long:
            # A smaller batch was no shorter: then few large ones are best, as where each takes a whole snapshot.
            self._given, self.batch_bytes = True, MOST_BYTES
        elif seconds > PAUSE_SECONDS:
            self.batch_bytes, self._too_long = max(self.batch_bytes // 2, LEAST_BYTES), seconds

    @property
    def breath_seconds(self) -> float:
        """How long to wait before the next batch."""
        return max(BREATH_SECONDS, min(BREATH_PAUSES * self._pause, max(_LONGEST_BREATH_SECONDS, 2 * self._pause)))
