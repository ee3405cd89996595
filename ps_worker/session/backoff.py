"""Decides how long to wait between attempts, and when to give up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ps_protocol.errors import NotReady, PsError, Retryable, StorageFull, Unavailable

T = TypeVar("T")

FIRST_SECONDS = 0.1
LONGEST_SECONDS = 2.0

_CALL_SECONDS = 5.0


class Backoff:
    """The pauses of one thread during one outage; they double from 0.1 s to 2 s.

    The time begins again whenever a NotReady reports progress.
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
        """Sleep before the next attempt.

        When the time is over, raises StorageFull if ``error`` is one, else Unavailable, with its shard and remedy.
        """
        if isinstance(error, NotReady) and error.progress > self._progress:
            self._progress = error.progress
            self._deadline = time.monotonic() + self._timeout_seconds
        if not self.left_seconds:
            kind = StorageFull if isinstance(error, StorageFull) else Unavailable
            raise kind(
                f"gave up after {self._timeout_seconds:g} seconds: {error.message}",
                shard=error.shard,
                remedy=error.remedy,
            ) from error
        time.sleep(min(self._pause_seconds, self.left_seconds))
        self._pause_seconds = min(2 * self._pause_seconds, LONGEST_SECONDS)


def persistently(call: Callable[[float], T], patience_seconds: float, wait: Callable[[Retryable], None]) -> T:
    """``call(timeout_seconds)``, repeated for ``patience_seconds`` after errors that ``wait`` is given in between."""
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            return call(max(0.1, min(_CALL_SECONDS, deadline - time.monotonic())))
        except Retryable as error:
            if time.monotonic() >= deadline:
                raise
            wait(error)
