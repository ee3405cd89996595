"""Decides whether and when a process that ended is started again. Pure."""

from __future__ import annotations

from collections.abc import Hashable

from ps_protocol import times
from ps_protocol.retry import RESTART


class Restarts:
    """The restarts that processes of one kind share. Called by one thread; all times are those of one clock.

    The first restart comes without a pause. Each further short life in a row doubles the pause, so that a process that
    fails repeatedly does not spin; a longer life ends the pauses.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._started: dict[Hashable, float] = {}
        self._again: set[Hashable] = set()
        #: The last pause of each process whose last life was short.
        self._pauses: dict[Hashable, float] = {}

    def started(self, process: Hashable, now: float) -> None:
        """``process`` is started."""
        if process in self._started:
            self._again.add(process)
        self._started[process] = now

    def never_lived(self, process: Hashable, now: float) -> bool:
        """Whether ``process``, which has just ended, failed right after its first start."""
        return process not in self._again and self._short(process, now)

    def take(self, process: Hashable, now: float) -> float | None:
        """Use one restart for ``process``, which has just ended; returns the pause in seconds, None without one."""
        if self.used == self.total:
            return None
        self.used += 1
        last = self._pauses.pop(process, None)
        if not self._short(process, now):
            return 0.0
        self._pauses[process] = 0.0 if last is None else RESTART.after(last)
        return self._pauses[process]

    def age(self, process: Hashable, now: float) -> float:
        """Seconds since the last start of ``process``."""
        return now - self._started[process]

    def _short(self, process: Hashable, now: float) -> bool:
        return self.age(process, now) < times.SHORT_LIFE_SECONDS
