"""Decides whether and when an actor that was lost is started again. Pure."""

from __future__ import annotations

from collections.abc import Hashable

SHORT_LIFE_SECONDS = 10.0
"""What ends sooner is started again with a delay."""

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 10.0


class RestartBudget:
    """The restarts that actors of one kind share; the rule is that of ps-run. Times are those of one clock.

    The first restart comes without a pause; each further short life in a row doubles the pause.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._started: dict[Hashable, float] = {}
        self._short_lives: dict[Hashable, int] = {}

    def started(self, name: Hashable, now: float) -> None:
        """``name`` is started."""
        self._started[name] = now

    def age(self, name: Hashable, now: float) -> float:
        """Seconds since the last start of ``name``."""
        return now - self._started[name]

    def take(self, name: Hashable, now: float) -> float | None:
        """Use one restart for ``name``, which was lost; the pause before it in seconds, None where none is left."""
        if self.used == self.total:
            return None
        self.used += 1
        short = now - self._started[name] < SHORT_LIFE_SECONDS
        lives = self._short_lives[name] = self._short_lives.get(name, 0) + 1 if short else 0
        return 0.0 if lives < 2 else min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** (lives - 2))
