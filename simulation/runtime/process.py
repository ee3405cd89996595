"""Owns one simulated process: what is due in it, its tasks and threads, and their end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from greenlet import greenlet

if TYPE_CHECKING:
    from simulation.runtime.kernel import Kernel

_CLOSINGS = 50
"""How often the coroutine of a dead process is closed: once for each ``finally`` that awaits."""


class Violation(BaseException):
    """A promise was broken. No ``except Exception`` of the shipped code catches it."""


class Killed(BaseException):
    """Unwinds the code of a process that has died."""


class Handle:
    """A callback that is due, and the process in which it runs."""

    __slots__ = ("_when", "arguments", "callback", "in_thread", "process")

    def __init__(
        self, when: float, callback: Callable[..., object], arguments: tuple[Any, ...], process: Process | None
    ) -> None:
        self._when = when
        self.callback: Callable[..., object] | None = callback
        self.arguments = arguments
        self.process = process
        #: It lets a thread go on, which it may while the event loop of the process is blocked.
        self.in_thread = False

    def cancel(self) -> None:
        """Do not run it."""
        self.callback = None
        self.arguments = ()

    def cancelled(self) -> bool:
        """Whether it was cancelled, or has run."""
        return self.callback is None

    def when(self) -> float:
        """The time at which it is due."""
        return self._when


class Process:
    """One simulated operating-system process. Its callbacks, tasks and threads end with it."""

    def __init__(self, kernel: Kernel, name: str, environment: dict[str, str] | None = None) -> None:
        self.name = name
        self.number = kernel.next_number()
        self.alive = True
        #: It stands still (SIGSTOP): what is due meanwhile runs when it goes on.
        self.stopped = False
        #: Its event loop waits in a call that blocks.
        self.blocked = 0
        #: What it finds in ``os.environ``.
        self.environment = environment or {}
        #: Descriptors that it has opened and not closed.
        self.descriptors: set[int] = set()
        #: Numbers of those that its end has closed: others may have them now.
        self.closed_at_end: set[int] = set()
        #: Threads that have begun and not ended.
        self.threads: dict[greenlet, None] = {}
        self.tasks: dict[asyncio.Task[Any], None] = {}
        #: Called once when it ends, however it ends.
        self.at_end: list[Callable[[], None]] = []
        self._kernel = kernel
        self._backlog: list[Handle] = []

    def __repr__(self) -> str:
        return self.name

    def stop(self) -> None:
        """Stand still until ``resume``."""
        self.stopped = True

    def resume(self) -> None:
        """Go on with everything that was due meanwhile."""
        self.stopped = False
        self.catch_up()

    def catch_up(self) -> None:
        """Run what was postponed, behind what is due now."""
        backlog, self._backlog = self._backlog, []
        for handle in backlog:
            self._kernel.again(handle)

    def postpone(self, handle: Handle) -> None:
        """Keep ``handle`` for when the process goes on."""
        self._backlog.append(handle)

    def kill(self) -> None:
        """End at once, as ``kill -9`` does; from inside the process, raise Killed afterwards."""
        if not self.alive:
            return
        self.alive = False
        self._kernel.say(self, "ends")
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.closed_at_end, self.descriptors = self.descriptors, set()
        for callback in self.at_end:
            callback()
        self._backlog.clear()
        # Its code may be on the stack now: it is unwound when nothing of it runs.
        self._kernel.schedule(0.0, None, self._bury)

    def _bury(self) -> None:
        """Unwind everything that is suspended; the substitutes raise Killed to whatever it calls meanwhile."""
        kernel = self._kernel
        kernel.process = self
        try:
            for thread in list(self.threads):
                while not thread.dead:
                    try:
                        thread.throw(Killed)
                    except Killed:
                        pass
            self.threads.clear()
            for task in list(self.tasks):
                _close(task)
            self.tasks.clear()
        finally:
            kernel.process = None


def _close(task: asyncio.Task[Any]) -> None:
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # of asyncio, and without another way to say so
    task._log_traceback = False
    coroutine: Any = task.get_coro()
    for _ in range(_CLOSINGS):
        try:
            coroutine.close()
            return
        except BaseException:  # noqa: BLE001 -- it is dead: whatever it raises is heard by nobody
            continue
