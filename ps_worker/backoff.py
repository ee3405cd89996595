"""Decides how long to wait between attempts, and when to give up."""

from __future__ import annotations

import time

from ps_protocol.errors import NotReady, PsError, Unavailable

FIRST_SECONDS = 0.1
LONGEST_SECONDS = 2.0


class Backoff:
    """One outage, as the thread that waits through it sees it. Pauses double from 0.1 s to 2 s.

    Its time begins again whenever a NotReady shows that the awaited has advanced.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._deadline = time.monotonic() + timeout_seconds
        self._pause_seconds = FIRST_SECONDS
        self._progress = 0

    @property
    def left_seconds(self) -> float:
        """Time until ``pause`` gives up."""
        return max(0.0, self._deadline - time.monotonic())

    def pause(self, error: PsError) -> None:
        """Sleep before the next attempt. Raises Unavailable, naming what ``error`` names, when the time is over."""
        if isinstance(error, NotReady) and error.progress > self._progress:
            self._progress = error.progress
            self._deadline = time.monotonic() + self._timeout_seconds
        if not self.left_seconds:
            raise Unavailable(
                f"gave up after {self._timeout_seconds:g} seconds: {error.message}",
                shard=error.shard,
                remedy=error.remedy,
            ) from error
        time.sleep(min(self._pause_seconds, self.left_seconds))
        self._pause_seconds = min(2 * self._pause_seconds, LONGEST_SECONDS)
