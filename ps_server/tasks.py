"""Tasks and threads whose end is awaited in any case, so that nothing they use is touched afterwards; a timer; and
conditions that events may make true. For everything that runs on an event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableSequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(
    work: Callable[[], None], threads: Executor | None = None, *, hurry: Callable[[], None] | None = None
) -> None:
    """Do ``work`` in a thread. A caller that is cancelled waits for its end: no memory is touched after the return.

    ``hurry`` is called then, to make it end soon.
    """
    future = asyncio.get_running_loop().run_in_executor(threads, work)
    try:
        await asyncio.shield(future)
    except asyncio.CancelledError:
        if hurry:
            hurry()
        while not future.done():
            with suppress(asyncio.CancelledError):  # again: the memory is lent all the same
                await asyncio.wait([future])
        future.exception()
        raise
    finally:
        del future  # its error refers to this frame: together they would keep lent memory until a garbage collection


async def finished(work: Awaitable[T]) -> T:
    """The result of ``work``. A caller that is cancelled meanwhile waits for its end."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def seen(task: asyncio.Future[T]) -> asyncio.Future[T]:
    """``task``, whose error is no defect where nobody asks for it any more: asyncio prints it otherwise."""
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


async def run_together(*works: Coroutine[Any, Any, None], until_all: bool = False) -> None:
    """Run ``works`` until the first ends or, with ``until_all``, until all have; the first error is raised.

    Those that are left then are cancelled and waited for.
    """
    tasks = [asyncio.ensure_future(each) for each in works]
    wanted = asyncio.FIRST_EXCEPTION if until_all else asyncio.FIRST_COMPLETED
    try:
        done, _ = await asyncio.wait(tasks, return_when=wanted)
        while done:
            done.pop().result()
    finally:
        await _end(tasks)


async def until(ended: asyncio.Future[None], work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, unless ``ended`` raises before: then the work is cancelled."""
    working = asyncio.ensure_future(work)
    try:
        await first_of(working, ended)
        if ended.done():
            ended.result()
        return working.result()
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def first_of(*works: Awaitable[Any], seconds: float | None = None) -> None:
    """Return when one of ``works`` has ended, or after ``seconds``. Coroutines among them are cancelled then; tasks and
    futures go on. None is asked for its result.
    """
    tasks = [asyncio.ensure_future(each) for each in works]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, work in zip(tasks, works, strict=True):
            if task is not work:
                task.cancel()


async def cancelled(task: asyncio.Future[Any]) -> None:
    """Cancel ``task``, and wait for its end."""
    task.cancel()
    await asyncio.wait([task])


async def _end(tasks: MutableSequence[asyncio.Task[None]]) -> None:
    """Cancel ``tasks``, wait for their end, and empty the list. Does so also when it is cancelled itself.

    Their errors refer to the frame that holds the list: together they would keep a push's memory until a garbage
    collection.
    """
    for task in tasks:
        task.cancel()
    try:
        await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        tasks.clear()


class Timer:
    """A timer that may be moved. ``ring`` is called once, at the time last set, by the loop's clock."""

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


class Conditions:
    """What callers on one event loop wait for, until they are told that something has changed."""

    def __init__(self) -> None:
        #: In the order in which they came, which is that in which they go on: a simulation is repeated by it.
        self._waiters: dict[asyncio.Future[None], None] = {}

    async def until(self, true: Callable[[], bool], seconds: float | None = None) -> bool:
        """Whether ``true()`` was so within this time, None: any; asked now, after each ``wake`` and at the end."""
        loop = asyncio.get_running_loop()
        deadline = None if seconds is None else loop.time() + seconds
        while not true():
            if not await self.changed(None if deadline is None else deadline - loop.time()):
                return true()
        return True

    async def changed(self, seconds: float | None = None) -> bool:
        """Whether ``wake`` was called within this time, None: any."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            async with asyncio.timeout(seconds):  # wait_for of Python 3.11 may lose a cancellation
                await waiter
        except TimeoutError:
            return False
        finally:
            self._waiters.pop(waiter, None)
        return True

    def wake(self) -> None:
        """Something has changed."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
