"""Owns virtual time: what is due, and in which order coroutines and greenlets take turns."""

from __future__ import annotations

import asyncio
import gc
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from random import Random
from typing import Any, NoReturn

from greenlet import getcurrent, greenlet

from simulation.runtime.loop import EventLoop
from simulation.runtime.process import Handle, Killed, Process, Violation

TRACE_KEPT = 400
"""Events remembered for the report of a violation."""

__all__ = ["Handle", "Kernel", "Killed", "Process", "Violation"]


class Kernel(EventLoop):
    """The one event loop of a run: all processes share it. The same seed gives the same events in the same order.

    Callbacks of a process run in the order in which they became due, as on a loop of its own. Time passes only when
    nothing is due.
    """

    def __init__(self, seed: object) -> None:
        super().__init__()
        self.random = Random(f"events of {seed}")
        #: Callbacks run so far.
        self.count = 0
        self.violation = ""
        self.loud = False
        self.hub: greenlet = getcurrent()
        self._said: deque[tuple[float, tuple[Any, ...]]] = deque(maxlen=TRACE_KEPT)
        self._timers: list[tuple[float, int, Handle]] = []
        self._processes = 0

    def next_number(self) -> int:
        """The number of a process."""
        self._processes += 1
        return self._processes

    # -- the run

    def run_world(self, until: float, done: Callable[[], bool]) -> None:
        """Run callbacks until ``done()``, virtual time ``until``, or a violation."""
        self.hub = getcurrent()
        loop: Any = self
        asyncio._set_running_loop(loop)
        try:
            self._run(until, done)
        finally:
            asyncio._set_running_loop(None)
            self.process = None

    def settle(self) -> None:
        """After the run: bury the dead, whatever they raise."""
        found, self.violation = self.violation, ""
        self.run_world(self.now, lambda: False)
        self.violation = found

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Within the block nothing of a dead process runs in another one: garbage is collected at the end.

        When the collector runs would else depend on what ran before.
        """
        hook = sys.unraisablehook

        def unraisable(unraised: Any) -> None:
            if not isinstance(unraised.exc_value, Killed | Violation | RuntimeError):
                hook(unraised)

        was_enabled = gc.isenabled()
        sys.unraisablehook = unraisable
        gc.disable()
        gc.freeze()
        with warnings.catch_warnings():
            # What a process was about to await when it died.
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            try:
                yield
            finally:
                self.process = Process(self, "nobody")
                self.process.alive = False
                gc.collect()
                gc.unfreeze()
                sys.unraisablehook = hook
                self.process = None
                if was_enabled:
                    gc.enable()

    def _run(self, until: float, done: Callable[[], bool]) -> None:
        ready, call = self._ready, self._call
        while not self.violation:
            if ready:
                call(ready.popleft())
            elif done() or not self._pass_time(until):
                return

    def _pass_time(self, until: float) -> bool:
        """Make the next timer due; False when there is none before ``until``."""
        timers = self._timers
        while timers:
            when, _, handle = timers[0]
            if handle.callback is None:
                heappop(timers)
                continue
            if when > until:
                self.now = until
                return False
            heappop(timers)
            if when > self.now:
                self.now = when
            self._ready.append(handle)
            return True
        return False

    def block(self, woken: Callable[[], bool]) -> None:
        """Code of an event loop waits: other processes, and threads of its own, go on until ``woken()``."""
        loop: Any = self
        process, task = self.process, asyncio.current_task(loop)
        assert process is not None
        process.blocked += 1
        if task is not None:
            asyncio.tasks._leave_task(loop, task)
        try:
            while process.alive and not woken() and not self.violation:
                if self._ready:
                    self._call(self._ready.popleft())
                elif not self._pass_time(float("inf")):
                    self.violate(f"{process} blocks its event loop for ever")
        finally:
            if task is not None:
                asyncio.tasks._enter_task(loop, task)
            self.process = process
            process.blocked -= 1
            if not process.blocked and not process.stopped:
                process.catch_up()
        if self.violation:
            raise Violation(self.violation)
        self.check_alive()

    def _call(self, handle: Handle) -> None:
        callback, process = handle.callback, handle.process
        if callback is None:
            return
        if process is not None:
            if not process.alive:
                return
            if process.stopped or (process.blocked and not handle.in_thread):
                process.postpone(handle)
                return
        self.process = process
        self.count += 1
        handle.callback = None
        try:
            callback(*handle.arguments)
        except Killed:
            pass
        except Violation as error:
            self.violate(str(error))
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- the run ends with it
            self.defect(process, error)

    def defect(self, process: Process | None, error: BaseException) -> None:
        """Nobody caught ``error``: a violation, unless its process is dead."""
        if process is None:
            raise error
        if process.alive:
            text = "".join(traceback.format_exception(error))
            self.violate(f"{process} raised what nobody caught: {text}")

    def violate(self, what: str) -> None:
        """End the run: a promise is broken."""
        self.violation = self.violation or what

    def fail(self, what: str) -> NoReturn:
        """As ``violate``, from code that must not go on. Raises Violation."""
        self.violate(what)
        raise Violation(what)

    def schedule(
        self, seconds: float, process: Process | None, callback: Callable[..., object], *arguments: Any
    ) -> Handle:
        """Call ``callback`` in ``process`` (None: outside all of them) in ``seconds`` seconds."""
        when = self.now + seconds
        handle = Handle(when, callback, arguments, process)
        if seconds <= 0.0:
            self._ready.append(handle)
        else:
            self._numbered += 1
            heappush(self._timers, (when, self._numbered, handle))
        return handle

    def again(self, handle: Handle) -> None:
        """Run ``handle`` behind what is due now."""
        self._ready.append(handle)

    def check_alive(self) -> None:
        """Raises Killed in a process that has died."""
        process = self.process
        if process is not None and not process.alive:
            raise Killed

    # -- the story

    def say(self, *parts: Any) -> None:
        """Note what happened; the text is made only when somebody reads it."""
        self._said.append((self.now, parts))
        if self.loud:
            sys.stdout.write(_line(self.now, parts) + "\n")

    def story(self, last: int = 60) -> str:
        """The last things said, one a line."""
        return "\n".join(_line(time, parts) for time, parts in list(self._said)[-last:])


def _line(time: float, parts: tuple[Any, ...]) -> str:
    return f"{time:9.4f}  " + " ".join(map(str, parts))
