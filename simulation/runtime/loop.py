"""What asyncio asks of an event loop, for the one loop that all simulated processes share."""

from __future__ import annotations

import abc
import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from simulation.runtime.process import Handle, Killed, Process, Violation


class _Task(asyncio.Task[Any]):
    """Its hash does not depend on its address, so that sets of tasks have the same order in every run."""

    _number = 0

    def __hash__(self) -> int:
        return self._number


class _Future(asyncio.Future[Any]):
    """As ``_Task``."""

    _number = 0

    def __hash__(self) -> int:
        return self._number


class EventLoop(abc.ABC):
    """The methods that tasks, futures and coroutines call; callbacks stay in the process that scheduled them."""

    def __init__(self) -> None:
        self.now = 0.0
        #: Whose code runs now.
        self.process: Process | None = None
        self._ready: deque[Handle] = deque()
        self._numbered = 0

    @abc.abstractmethod
    def schedule(
        self, seconds: float, process: Process | None, callback: Callable[..., object], *arguments: Any
    ) -> Handle:
        """See Kernel."""

    @abc.abstractmethod
    def say(self, *parts: Any) -> None:
        """See Kernel."""

    def time(self) -> float:
        """Virtual seconds."""
        return self.now

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        """Behind what is due now, in the same process."""
        handle = Handle(self.now, callback, args, self.process)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        """In ``delay`` seconds, in the same process."""
        return self.schedule(delay, self.process, callback, *args)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        """At ``when``, in the same process."""
        return self.schedule(when - self.now, self.process, callback, *args)

    def create_future(self) -> asyncio.Future[Any]:
        """A future whose hash is the same in every run."""
        loop: Any = self
        future = _Future(loop=loop)
        self._numbered += 1
        future._number = self._numbered
        return future

    def create_task(
        self, coro: Coroutine[Any, Any, Any] | Any, *, name: str | None = None, context: Any = None
    ) -> asyncio.Task[Any]:
        """A task of the process that creates it."""
        process = self.process
        if process is not None and not process.alive:
            coro.close()
            raise Killed
        task = _Task.__new__(_Task)
        self._numbered += 1
        task._number = self._numbered
        task.__init__(coro, loop=self, name=name or "task")  # type: ignore[misc]  # it is hashed while it is made
        if process is not None:
            process.tasks[task] = None
            task.add_done_callback(process.tasks.pop)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """In a thread of ``executor``, or of its own."""
        from simulation.runtime.futures import Future, start_call

        made = executor.submit(func, *args) if executor is not None else start_call(Future(), func, args)
        loop: Any = self
        return asyncio.wrap_future(made, loop=loop)

    #: False, said without a frame of Python: every future and every task asks.
    get_debug = staticmethod(bool)

    def is_running(self) -> bool:
        """While a run is under way."""
        return True

    def is_closed(self) -> bool:
        """Never."""
        return False

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """See ``call_exception_handler``."""
        self.call_exception_handler(context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """An exception that nobody has seen."""
        error = context.get("exception")
        if isinstance(error, Killed | Violation) or self.process is None or not self.process.alive:
            return
        if isinstance(error, BaseException):
            self.say(self.process, context.get("message"), repr(error))
