"""Stands for ``concurrent.futures``: futures that greenlets wait for, and pools of greenlets."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, Self

from simulation.runtime.locks import Event, FutureCondition, SimpleQueue
from simulation.runtime.threads import Thread
from simulation.runtime.wait import kernel


class Future(concurrent.futures.Future[Any]):
    """As ``concurrent.futures.Future``; made without the lock of real threads.

    Its hash does not depend on its address, so that sets of futures have the same order in every run.
    """

    def __class_getitem__(cls, item: Any) -> type[Future]:  # type: ignore[override]
        return cls

    def __init__(self) -> None:
        self._condition: Any = FutureCondition()
        self._state = "PENDING"
        self._result: Any = None
        self._exception: BaseException | None = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Callable[[Any], object]] = []
        self._number = kernel().next_number()

    def __hash__(self) -> int:
        return self._number


def start_call(future: Future, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Future:
    """Run ``function`` in a thread of its own; ``future`` holds what comes of it."""
    Thread(target=_call, args=(future, function, arguments), name="worker").start()
    return future


def _call(future: Future, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function(*arguments)
    except Exception as error:  # noqa: BLE001 -- it is raised where it is waited for
        future.set_exception(error)
    else:
        future.set_result(result)


def run_coroutine_threadsafe(coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Future:
    """As of ``asyncio``; a coroutine whose future is cancelled runs to its end."""
    future = Future()

    async def run() -> None:
        try:
            result = await coroutine
        except Exception as error:  # noqa: BLE001 -- it is raised where it is waited for
            if not future.cancelled():
                future.set_exception(error)
        else:
            if not future.cancelled():
                future.set_result(result)

    loop.call_soon_threadsafe(lambda: loop.create_task(run()))
    return future


class ThreadPoolExecutor:
    """As ``concurrent.futures.ThreadPoolExecutor``."""

    def __init__(
        self,
        max_workers: int | None = None,
        thread_name_prefix: str = "",
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
    ) -> None:
        self._most = max_workers or 32
        self._name = thread_name_prefix
        self._initializer, self._initargs = initializer, initargs
        self._work = SimpleQueue()
        self._threads: list[Thread] = []
        self._idle = 0
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def submit(self, function: Callable[..., Any], /, *args: Any, **keywords: Any) -> Future:
        """Have a thread call ``function``."""
        kernel().check_alive()
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = Future()
        self._work.put((future, lambda: function(*args, **keywords)))
        if self._idle < self._work.qsize() and len(self._threads) < self._most:
            thread = Thread(target=self._run, name=f"{self._name}_{len(self._threads)}")
            self._threads.append(thread)
            thread.start()
        return future

    def _run(self) -> None:
        if self._initializer:
            self._initializer(*self._initargs)
        while True:
            self._idle += 1
            item = self._work.get()
            self._idle -= 1
            if item is None:
                return
            future, call = item
            _call(future, call, ())

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads when everything submitted is done."""
        if not self._closed:
            self._closed = True
            for _ in self._threads:
                self._work.put(None)
        if wait:
            for thread in self._threads:
                thread.join()


class DoneAndNotDone(tuple[set[Any], set[Any]]):
    """What ``wait`` returns."""

    @property
    def done(self) -> set[Any]:
        """Those that are done."""
        return self[0]

    @property
    def not_done(self) -> set[Any]:
        """The others."""
        return self[1]


def _setter(event: Event) -> Callable[[Any], None]:
    return lambda _: event.set()


def wait(futures: Iterable[Any], timeout: float | None = None, return_when: str = "ALL_COMPLETED") -> DoneAndNotDone:
    """As ``concurrent.futures.wait``."""
    waited = list(dict.fromkeys(futures))
    deadline = None if timeout is None else kernel().now + timeout
    first = return_when == "FIRST_COMPLETED"
    while True:
        done = [future for future in waited if future.done()]
        left = None if deadline is None else deadline - kernel().now
        enough = bool(done) if first else len(done) == len(waited)
        if return_when == "FIRST_EXCEPTION":
            enough = enough or any(future.cancelled() or future.exception() for future in done)
        if enough or (left is not None and left <= 0):
            return DoneAndNotDone((set(done), {future for future in waited if not future.done()}))
        changed = Event()
        for future in waited:
            if not future.done():
                future.add_done_callback(_setter(changed))
        changed.wait(left)
