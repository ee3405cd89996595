"""The last events of a job, as text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from ps_protocol.cluster.view import JobEvent

EVENTS = 400
"""The number of events kept."""

DECISIONS = 10
"""How many decisions the status includes."""

TEXT_CHARACTERS = 500
"""Longest text of an event."""


class EventLog:
    """Used on the coordinator's event loop."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """``clock`` gives seconds since 1970."""
        self._clock = clock
        self._events: deque[JobEvent] = deque(maxlen=EVENTS)
        self._decisions: deque[JobEvent] = deque(maxlen=DECISIONS)
        self._number = 0

    def add(self, text: str, *, warning: bool = False, decision: bool = False) -> None:
        """Add an event; a very long ``text`` is cut. ``decision``: whether the coordinator decided it."""
        self._number += 1
        event = JobEvent(self._number, self._clock(), text[:TEXT_CHARACTERS], warning)
        self._events.append(event)
        if decision:
            self._decisions.append(event)

    @property
    def decisions(self) -> tuple[JobEvent, ...]:
        """The last decisions of this process, oldest first."""
        return tuple(self._decisions)

    def restore(self, before: Sequence[JobEvent]) -> None:
        """Put the events of an earlier process before those of this one, which get new numbers."""
        number = before[-1].number if before else 0
        since = [replace(event, number=number + at) for at, event in enumerate(self._events, 1)]
        self._number = number + len(since)
        self._events = deque([*before, *since], maxlen=EVENTS)

    @property
    def all(self) -> tuple[JobEvent, ...]:
        """The kept events, oldest first."""
        return tuple(self._events)
