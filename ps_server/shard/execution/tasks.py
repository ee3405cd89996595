"""Tasks and threads whose end is awaited in any case, so that nothing they use is touched afterwards; a timer; and
conditions that events may make true.
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
        either: list[asyncio.Future[Any]] = [working, ended]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            ended.result()
        return working.result()
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


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
    """Used on one event loop."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    async def until(self, true: Callable[[], bool], seconds: float) -> bool:
        """Whether ``true()`` was so within this time; asked now, after each ``wake`` and at the end."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not true():
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait_for(waiter, deadline - loop.time())
            except TimeoutError:
                return true()
            finally:
                self._waiters.discard(waiter)
        return True

    def wake(self) -> None:
        """Something has changed."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
