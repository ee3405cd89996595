"""Tensor work of a shard, one piece at a time, in the order it was submitted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from ps_server.shard.execution.watchdog import Watchdog

T = TypeVar("T")

INLINE_WORK_BYTES = 256 << 10
"""Work on fewer bytes than this takes less time than handing it to a thread."""


class ShardExecutor:
    """Called from the event loop. Order of execution is order of submission, so tensors need no lock.

    Large work runs on one thread of its own, outside the interpreter lock where torch releases it; small work runs at
    once on the loop when nothing is queued before it. Work that was submitted always runs, also when its future is
    not awaited any more: a cancelled stream must not take an accepted push with it.
    """

    def __init__(self, threads: int = 0, watchdog: Watchdog | None = None) -> None:
        """``threads``: torch's threads within one piece of large work; 0 is half of the cores, for workers need some.

        The calling thread, the loop's, does small work with one: waiting for another would take longer than the work.
        ``watchdog`` observes each piece.
        """
        within = threads or max(1, torch.get_num_threads() // 2)

        def begin() -> None:
            torch.set_num_threads(within)

        torch.set_num_threads(1)
        self._threads = ThreadPoolExecutor(1, "executor", begin)
        self._watchdog = watchdog
        #: Pieces of work on the thread: one that runs, and those that wait.
        self.queued = 0
        #: Of all calls, with its thread; found at the first.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0

    def submit(self, work: Callable[[], T], nbytes: int, *, quick: bool = False) -> asyncio.Future[T]:
        """Queue ``work``, which touches about ``nbytes`` bytes; the future holds its result or exception.

        ``quick``: it is known to take no more time than handing it to a thread.
        """
        if (loop := self._loop) is None:
            loop = self._loop = asyncio.get_running_loop()  # a system call each time
            self._loop_thread = threading.get_ident()
        answer: asyncio.Future[T] = loop.create_future()
        if self.queued == 0 and (quick or nbytes < INLINE_WORK_BYTES):
            watchdog = self._watchdog
            if watchdog is not None:
                watchdog.work = nbytes, self._loop_thread
            try:
                answer.set_result(work())
            except Exception as error:  # noqa: BLE001 -- it belongs to the caller
                answer.set_exception(error)
                answer.exception()  # seen, as below
            finally:
                if watchdog is not None:
                    watchdog.work = None
            return answer
        self.queued += 1

        def finish(done: Future[T]) -> None:
            self.queued -= 1
            _copy(done, answer)

        self._threads.submit(self._watched, work, nbytes).add_done_callback(
            lambda done: loop.call_soon_threadsafe(finish, done)
        )
        return answer

    def _watched(self, work: Callable[[], T], nbytes: int) -> T:
        if self._watchdog is None:
            return work()
        self._watchdog.work = nbytes, threading.get_ident()
        try:
            return work()
        finally:
            self._watchdog.work = None

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._threads.shutdown(wait=True)


def _copy(done: Future[T], answer: asyncio.Future[T]) -> None:
    if answer.cancelled():
        return
    error = done.exception()
    if error is None:
        answer.set_result(done.result())
    else:
        answer.set_exception(error)
        answer.exception()  # seen: a failed apply is also kept by the model, by its failure
