"""Stands for Python's locks, conditions, events and queues between threads of one process."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal

from greenlet import getcurrent, greenlet

from simulation.runtime.wait import Wait, kernel, process


class Lock:
    """As ``threading.Lock``."""

    _reentrant = False

    def __init__(self) -> None:
        self._owner: greenlet | None = None
        self._depth = 0
        self._waiting: deque[Wait] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it, waiting for it if need be."""
        me = getcurrent()
        if self._owner is None or (self._reentrant and self._owner is me):
            self._owner = me
            self._depth += 1
            return True
        if not blocking:
            return False
        deadline = None if timeout < 0 else kernel().now + timeout
        while self._owner is not None:
            left = None if deadline is None else deadline - kernel().now
            if left is not None and left <= 0:
                return False
            wait = Wait()
            self._waiting.append(wait)
            wait.pause(left)
        self._owner, self._depth = me, 1
        return True

    def release(self) -> None:
        """Give it back."""
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            while self._waiting:
                wait = self._waiting.popleft()
                if not wait.done:
                    wait.wake()
                    break

    def locked(self) -> bool:
        """Whether somebody has it."""
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release_all(self) -> int:
        """For a condition: give it back, however often it was taken."""
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def take_again(self, depth: int) -> None:
        """For a condition: take it as often as before."""
        self.acquire()
        self._depth = depth


class RLock(Lock):
    """As ``threading.RLock``."""

    _reentrant = True


class Condition:
    """As ``threading.Condition``."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or RLock()
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self._waiting: deque[Wait] = deque()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Give the lock back until notified."""
        wait = Wait()
        self._waiting.append(wait)
        depth = self._lock.release_all()
        try:
            return wait.pause(timeout)
        finally:
            if kernel().process is None or process().alive:
                self._lock.take_again(depth)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait until ``predicate()``."""
        deadline = None if timeout is None else kernel().now + timeout
        while not (result := predicate()):
            left = None if deadline is None else deadline - kernel().now
            if left is not None and left <= 0:
                return result
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        """Wake so many."""
        while n and self._waiting:
            wait = self._waiting.popleft()
            if not wait.done:
                wait.wake()
                n -= 1

    def notify_all(self) -> None:
        """Wake all."""
        self.notify(len(self._waiting))


class FutureCondition(Condition):
    """The condition of a future: without a lock, for no thread gives the turn away while it has that lock."""

    def __enter__(self) -> bool:
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def wait(self, timeout: float | None = None) -> bool:
        """Until notified."""
        wait = Wait()
        self._waiting.append(wait)
        return wait.pause(timeout)

    def notify_all(self) -> None:
        """Wake all."""
        if self._waiting:
            self.notify(len(self._waiting))


class Event:
    """As ``threading.Event``."""

    def __init__(self) -> None:
        self._set = False
        self._waiting: list[Wait] = []

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def set(self) -> None:
        """Wake all who wait."""
        self._set = True
        waiting, self._waiting = self._waiting, []
        for wait in waiting:
            wait.wake()

    def clear(self) -> None:
        """Have everybody wait again."""
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set; whether it is."""
        if not self._set and (timeout is None or timeout > 0):
            wait = Wait()
            self._waiting.append(wait)
            if not wait.pause(timeout) and wait in self._waiting:
                self._waiting.remove(wait)
        return self._set


class SimpleQueue:
    """As ``queue.SimpleQueue``."""

    def __class_getitem__(cls, item: Any) -> type[SimpleQueue]:
        return cls

    def __init__(self, maxsize: Literal[0] = 0) -> None:
        self._items: deque[Any] = deque()
        self._waiting: deque[Wait] = deque()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Add ``item``."""
        self._items.append(item)
        while self._waiting:
            wait = self._waiting.popleft()
            if not wait.done:
                wait.wake()
                break

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next item. Raises queue.Empty."""
        deadline = None if timeout is None else kernel().now + timeout
        while not self._items:
            left = None if deadline is None else deadline - kernel().now
            if not block or (left is not None and left <= 0):
                raise queue.Empty
            wait = Wait()
            self._waiting.append(wait)
            wait.pause(left)
        return self._items.popleft()

    def put_nowait(self, item: Any) -> None:
        """As ``put``."""
        self.put(item)

    def get_nowait(self) -> Any:
        """As ``get``, without waiting."""
        return self.get(block=False)

    def empty(self) -> bool:
        """Whether there is no item."""
        return not self._items

    def qsize(self) -> int:
        """How many items there are."""
        return len(self._items)
