"""Owns one timer on the event loop, which may be moved as often as wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Alarm:
    """Used from one event loop. ``ring`` is called there once for the time last set, by the loop's own clock."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, when: float | None) -> None:
        """Ring at ``when``, and not at any time set before; None: not at all."""
        if self._timer is not None:
            if self._timer.when() == when:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._rings) if when is not None else None

    def _rings(self) -> None:
        self._timer = None
        self._ring()
