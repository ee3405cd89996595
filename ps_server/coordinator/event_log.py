"""The last events of a job, in words."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ps_protocol.cluster.history import JobEvent

EVENTS = 400
"""How many are kept."""

_TEXT = 500


class EventLog:
    """Used on the coordinator's event loop."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """``clock`` gives seconds since 1970."""
        self._clock = clock
        self._events: deque[JobEvent] = deque(maxlen=EVENTS)
        self._number = 0

    def add(self, text: str, *, warning: bool = False) -> None:
        """Something has happened; a very long ``text`` is cut."""
        self._number += 1
        self._events.append(JobEvent(self._number, self._clock(), text[:_TEXT], warning))

    @property
    def all(self) -> tuple[JobEvent, ...]:
        """Those that are kept, oldest first."""
        return tuple(self._events)
