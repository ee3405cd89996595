"""Decides whether and when a process that ended is restarted."""

from __future__ import annotations

from ps_server.cli.launcher.events import ProcessName

SHORT_LIFE_SECONDS = 10.0
"""A process that ends sooner is restarted with a delay."""

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 10.0


class Restarts:
    """The restarts that processes of one kind share. Called by the supervisor; does no I/O.

    The first restart comes without a pause. Each further end at once in a row doubles the pause, so that a process
    that fails repeatedly does not spin; a longer run resets the delay.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._started: dict[ProcessName, float] = {}
        self._again: set[ProcessName] = set()
        self._short_runs: dict[ProcessName, int] = {}

    def started(self, process: ProcessName, now: float) -> None:
        """``process`` is started."""
        if process in self._started:
            self._again.add(process)
        self._started[process] = now

    def never_lived(self, process: ProcessName, now: float) -> bool:
        """Whether ``process``, which has just ended, failed right after its first start."""
        return process not in self._again and self._short(process, now)

    def take(self, process: ProcessName, now: float) -> float | None:
        """Use one restart for ``process``, which has just ended; returns the delay, None when no restart is left."""
        if self.used == self.total:
            return None
        self.used += 1
        lives = self._short_runs.get(process, 0) + 1 if self._short(process, now) else 0
        self._short_runs[process] = lives
        return 0.0 if lives < 2 else min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** (lives - 2))

    def age(self, process: ProcessName, now: float) -> float:
        """Seconds since the last start of ``process``."""
        return now - self._started[process]

    def _short(self, process: ProcessName, now: float) -> bool:
        return now - self._started[process] < SHORT_LIFE_SECONDS
