"""Waits of the main thread, which a signal right before them ends; and calls that no signal interrupts."""

from __future__ import annotations

import _thread
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Any

import pytest

from ps_protocol.errors import Unavailable
from ps_protocol.interruptible import next_item, result_of, without_signals
from tests.support.shards import wait_until


def _waits() -> bool:
    """Whether the main thread waits for an item."""
    frame: FrameType | None = sys._current_frames()[threading.main_thread().ident or 0]
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names[0] in ("next_item", "wait") and "next_item" in names


@pytest.mark.parametrize(
    "wait",
    [
        lambda: next_item(queue.SimpleQueue[None]()),
        lambda: next_item(queue.Queue[None]()),
        lambda: result_of(Future[None]()),
    ],
    ids=["a queue of C", "a queue with a bound", "a future"],
)
def test_a_signal_that_does_not_wake_who_waits_gets_through(wait: Callable[[], object]) -> None:
    def interrupt() -> None:
        wait_until(_waits)
        _thread.interrupt_main()  # only marks the signal, as one that comes before the thread waits

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        wait()
    thread.join()


def test_what_is_there_comes_at_once_and_in_order() -> None:
    items: queue.SimpleQueue[int] = queue.SimpleQueue()
    items.put(1)
    items.put(2)
    assert (next_item(items), next_item(items)) == (1, 2)


def test_what_is_called_without_signals_returns_and_raises_as_it_does_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> int:
        raise Unavailable("away")

    def no_thread(*_: Any) -> int:
        raise RuntimeError("can't start new thread")

    def look() -> None:
        assert without_signals(lambda: 7) == 7
        with pytest.raises(Unavailable, match="away"):
            without_signals(fails)

    assert without_signals(_thread.get_ident) != _thread.get_ident()
    look()
    monkeypatch.setattr(_thread, "start_new_thread", no_thread)
    assert without_signals(_thread.get_ident) == _thread.get_ident()
    look()
