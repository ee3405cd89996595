"""Decides whether a process that ended is started again, and when."""

from __future__ import annotations

from ps_server.launcher.events import ProcessName

SHORT_LIFE_SECONDS = 10.0
"""A process that ends sooner has ended at once."""

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 10.0


class Restarts:
    """The restarts that processes of one kind share. Called by the supervisor; does no I/O.

    The first restart comes without a pause. Each further end at once in a row doubles the pause, so that a process
    that cannot live does not spin; a longer life begins anew.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._started: dict[ProcessName, float] = {}
        self._again: set[ProcessName] = set()
        self._short_lives: dict[ProcessName, int] = {}

    def started(self, process: ProcessName, now: float) -> None:
        """A life of ``process`` begins."""
        if process in self._started:
            self._again.add(process)
        self._started[process] = now

    def never_lived(self, process: ProcessName, now: float) -> bool:
        """Whether ``process``, which ends now, has ended at once at its very first start."""
        return process not in self._again and self._short(process, now)

    def take(self, process: ProcessName, now: float) -> float | None:
        """Use one restart for ``process``, which ends now; seconds to wait before it, None when none is left."""
        if self.used == self.total:
            return None
        self.used += 1
        lives = self._short_lives.get(process, 0) + 1 if self._short(process, now) else 0
        self._short_lives[process] = lives
        return 0.0 if lives < 2 else min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** (lives - 2))

    def _short(self, process: ProcessName, now: float) -> bool:
        return now - self._started[process] < SHORT_LIFE_SECONDS
