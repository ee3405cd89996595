"""A model's region as published at one version: read by every reply of that version, never changed under a reader."""

from __future__ import annotations

import asyncio
import threading

from ps_server.optimizers import Region
from ps_server.shard.pool import RegionPool

_PATIENCE_SECONDS = 0.05


class Published:
    """Taken and given back on the event loop; ready when the lane has made its version.

    It is the live region itself, so reading the newest version costs no copy. An update that finds readers leaves the
    region to them and goes on in a copy (copy on write, as a forked process's memory): no reply is ever torn, no reader
    holds training up, and a region is copied only when somebody still reads it.
    """

    def __init__(self, version: int, ready: asyncio.Future[Region], pool: RegionPool) -> None:
        self.version = version
        #: The region, once the work that makes this version is done.
        self.ready = ready
        self.takers = 0
        #: Takers that read at the rate of a network.
        self._slow = 0
        self._unread = threading.Event()
        self._pool = pool
        self._left_to_readers = False

    @property
    def region(self) -> Region:
        """The bytes; valid once ``ready`` is done."""
        return self.ready.result()

    def take(self, *, quick: bool) -> None:
        """One taker more; ``quick``: one that reads from shared memory."""
        self._unread.clear()
        self.takers += 1
        self._slow += not quick

    def give_back(self, *, quick: bool) -> None:
        """One taker less."""
        self.takers -= 1
        self._slow -= not quick
        if self.takers == 0:
            self._unread.set()
        self._give_region()

    def still_read(self, *, patient: bool) -> bool:
        """In the lane, when nobody takes this any more: whether somebody reads it yet.

        A copy of the region takes as long as reading it from shared memory: ``patient`` waits some time for takers
        that are quick.
        """
        if self.takers and patient and not self._slow:
            self._unread.wait(_PATIENCE_SECONDS)
        return self.takers > 0

    def leave_to_readers(self) -> None:
        """The model goes on in another region: this one goes back to the pool with its last taker."""
        self._left_to_readers = True
        self._give_region()

    def _give_region(self) -> None:
        if self._left_to_readers and self.takers == 0:
            self._left_to_readers = False
            self._pool.give(self.region)


class Copies:
    """Whether the lane is copying a region for its readers. Begun in the lane, ended and waited for on the loop."""

    def __init__(self) -> None:
        self._under_way = False
        self._waiting: list[asyncio.Future[None]] = []

    def begin(self) -> None:
        """The lane begins to copy."""
        self._under_way = True

    def end(self) -> None:
        """The copy is made, and the region left to its readers."""
        self._under_way = False
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting.clear()

    async def ended(self) -> None:
        """Returns when nothing is being copied."""
        if self._under_way:
            self._waiting.append(waiting := asyncio.get_running_loop().create_future())
            await waiting
