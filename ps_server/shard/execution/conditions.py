"""Waits for conditions that events on the event loop may make true."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


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
