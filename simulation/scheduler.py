"""Owns virtual time: one queue of events, processes that can stand still or die, and nothing that really waits."""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

TRACE_KEPT = 300
"""Events remembered, for the report of a violation."""


class Violation(Exception):
    """A promise was broken. The judge raises it, or a shell that met what must not happen."""


class Killed(BaseException):
    """Unwinds a process that dies in the middle of its own work; only the scheduler catches it."""


@dataclass(slots=True, eq=False)
class Process:
    """A place where events happen. What is on its way to a life that ended is lost."""

    name: str
    life: int = 1
    alive: bool = True
    #: It stands still until then (SIGSTOP): what reaches it meanwhile comes all at once.
    stopped_until: float = 0.0

    def die(self) -> None:
        """End this life."""
        self.life += 1
        self.alive = False


Entry = tuple[float, int, Process | None, int, Callable[..., None], tuple[Any, ...]]


class Scheduler:
    """Runs everything, in one thread. The same seed gives the same events in the same order."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = Random(seed)
        #: The last things said: time and parts of a sentence.
        self.said: deque[tuple[float, tuple[Any, ...]]] = deque(maxlen=TRACE_KEPT)
        self.loud = False
        #: Events run so far.
        self.count = 0
        self._queue: list[Entry] = []
        self._numbered = 0

    def after(self, seconds: float, process: Process | None, do: Callable[..., None], *arguments: Any) -> None:
        """Call ``do`` in the present life of ``process`` (None: nobody's) in ``seconds`` seconds."""
        self.at(self.now + seconds, process, do, *arguments)

    def at(self, time: float, process: Process | None, do: Callable[..., None], *arguments: Any) -> None:
        """Call ``do`` at ``time``, after what was scheduled for the same time before; a dead process gets nothing."""
        if process is not None and not process.alive:
            return
        self._numbered += 1
        heapq.heappush(self._queue, (time, self._numbered, process, process.life if process else 0, do, arguments))

    def say(self, *parts: Any) -> None:
        """Note what happened; the text is made only when somebody reads it."""
        self.said.append((self.now, parts))
        if self.loud:
            sys.stdout.write(_line(self.now, parts) + "\n")

    def story(self, last: int = 60) -> str:
        """The last things said, one a line."""
        return "\n".join(_line(time, parts) for time, parts in list(self.said)[-last:])

    def run(self, until: float, done: Callable[[], bool]) -> None:
        """Run events until ``done()`` or virtual time ``until``."""
        queue = self._queue
        while queue and not done():
            time, _, process, life, do, arguments = heapq.heappop(queue)
            if time > until:
                self.at(time, process, do, *arguments)
                self.now = until
                return
            self.now = time
            if process is not None:
                if process.life != life:
                    continue
                if process.stopped_until > time:
                    self.at(process.stopped_until, process, do, *arguments)
                    continue
            self.count += 1
            try:
                do(*arguments)
            except Killed:
                pass


def _line(time: float, parts: tuple[Any, ...]) -> str:
    return f"{time:9.4f}  " + " ".join(map(str, parts))
