"""Limits the memory of answers on their way: of all clients together, and of each."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

from ps_protocol.errors import Unavailable
from ps_server.limits import ANSWERS, LimitCounts
from ps_server.tables.arrays import machine_bytes

PATIENCE_SECONDS = 10.0
"""How long a request waits for memory before it is refused."""

READERS = "readers"
"""Clients that are no members: together they share what one worker may take."""


class AnswerBudget:
    """Used on the shard's event loop. Nothing is taken while something else is held, so there is no deadlock."""

    def __init__(self, limit_bytes: int = 0, counts: LimitCounts | None = None) -> None:
        """``limit_bytes``: of all answers; 0: a quarter of this machine's memory. One client may take half of it."""
        self._counts = counts or LimitCounts()
        self.limit_bytes = limit_bytes or machine_bytes() // 4
        self._used: Counter[Hashable] = Counter()
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def used_bytes(self) -> int:
        """Of answers on their way."""
        return self._used.total()

    @asynccontextmanager
    async def taken(self, who: Hashable, size_bytes: int) -> AsyncIterator[None]:
        """Hold ``size_bytes`` for an answer to ``who``.

        One that is larger than a client may take counts as that much: it goes when its client has no other.
        Raises Unavailable when there is no room for it in time.
        """
        size_bytes = min(size_bytes, self.limit_bytes // 2)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not self._fits(who, size_bytes):
                    await self._changed()
        except TimeoutError:
            self._counts.add(ANSWERS)
            raise Unavailable(
                "this shard has too many answers on their way",
                expected=f"{self.limit_bytes} bytes of all clients together, and half of that of one",
                actual=f"{self.used_bytes} bytes, and one of {size_bytes} bytes more",
                remedy="ask for less at a time, or start ps-server with a larger --answer-mb",
            ) from None
        self._used[who] += size_bytes
        try:
            yield
        finally:
            self._used[who] -= size_bytes
            if not self._used[who]:
                del self._used[who]
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _fits(self, who: Hashable, size_bytes: int) -> bool:
        own = self._used.get(who, 0)
        return self.used_bytes + size_bytes <= self.limit_bytes and own + size_bytes <= self.limit_bytes // 2

    async def _changed(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
