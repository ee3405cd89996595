"""Waits of a thread that handlers of signals interrupt, such as that of Ctrl-C, and calls that they do not.

Python marks a signal, and runs its handler when the thread goes on. A signal that comes right before the thread begins
to wait does not wake it, so such a wait looks for signals now and then.
"""

from __future__ import annotations

import _thread
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_LOOK_SECONDS = 0.2
"""How often a thread that waits looks for signals."""


def next_item(items: queue.SimpleQueue[T] | queue.Queue[T]) -> T:
    """The next of ``items``, waited for. A handler of a signal runs within ``_LOOK_SECONDS``."""
    while True:
        try:
            return items.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            pass


def result_of(future: Any) -> Any:
    """The result of a future of gRPC or of Python, waited for in the same way. Raises what it raises."""
    done: queue.SimpleQueue[None] = queue.SimpleQueue()
    future.add_done_callback(lambda _: done.put(None))
    next_item(done)
    return future.result()


def without_signals(call: Callable[[], T]) -> T:
    """The result of ``call``, which no signal interrupts: a handler that raises inside gRPC may leave a lock locked.

    Signals interrupt the main thread alone. It waits here, as in ``next_item``, while another thread calls.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    results: list[T] = []
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        failure = None
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001  (raised in the thread that waits)
            failure = error
        ended.put(failure)

    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:  # Python is about to end, or has as many threads as it may
        return call()
    if (failed := next_item(ended)) is not None:
        raise failed
    return results[0]
