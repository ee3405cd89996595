"""A model as its readers see it: the region of one version, and which slices have changed since another."""

from __future__ import annotations

import asyncio
import threading

import numpy as np

from ps_protocol.model.layout import Layout
from ps_server.shard import times
from ps_server.state.region import Region, RegionPool


class Published:
    """Taken and given back on the event loop; ready when the executor has made its version.

    It is the replica's own region, so reading the newest version costs no copy. An update that finds readers leaves the
    region to them and continues in a copy (copy on write, as a forked process's memory): no reply is ever torn, no
    reader delays training, and a region is copied only while it is read.
    """

    def __init__(self, version: int, ready: asyncio.Future[Region], pool: RegionPool) -> None:
        self.version = version
        #: The region, once the work that makes this version is done.
        self.ready = ready
        self.takers = 0
        #: Takers that read at the rate of a network.
        self._slow = 0
        #: Set by the last taker, once the executor waits for that.
        self._unread: threading.Event | None = None
        self._pool = pool
        self._left_to_readers = False

    @property
    def region(self) -> Region:
        """The bytes; valid once ``ready`` is done."""
        return self.ready.result()

    def take(self, *, quick: bool) -> None:
        """One taker more; ``quick``: one that reads from shared memory."""
        self.takers += 1
        self._slow += not quick

    def give_back(self, *, quick: bool) -> None:
        """One taker less."""
        self.takers -= 1
        self._slow -= not quick
        if self.takers == 0:
            if self._unread is not None:
                self._unread.set()
            if self._left_to_readers:
                self._give_region()

    def still_read(self, *, patient: bool) -> bool:
        """In the executor, when it is not taken any more: whether it is still read.

        A copy of the region takes as long as reading it from shared memory: ``patient`` waits some time for takers
        that are quick.
        """
        return self.takers > 0 and not self.unread(times.UNREAD_SECONDS if patient and not self._slow else 0.0)

    def unread(self, patience_seconds: float) -> bool:
        """In the executor, when it is not taken any more: whether nobody reads it, now or after some patience."""
        if self.takers and patience_seconds:
            self._unread = threading.Event()
            if self.takers:  # asked after the event is there for the last of them
                self._unread.wait(patience_seconds)
        return self.takers == 0

    def leave_to_readers(self) -> None:
        """The model continues in another region: this one returns to the pool with its last taker."""
        self._left_to_readers = True
        if self.takers == 0:
            self._give_region()

    def _give_region(self) -> None:
        self._left_to_readers = False
        self._pool.give(self.region)


class CopyInProgress:
    """Whether the executor is copying a region for its readers. Begun there, ended and waited for on the loop."""

    def __init__(self) -> None:
        #: Read on the loop, before ``ended`` is waited for.
        self.under_way = False
        self._waiting: list[asyncio.Future[None]] = []

    def begin(self) -> None:
        """The executor begins to copy."""
        self.under_way = True

    def end(self) -> None:
        """The copy is made, and the region left to its readers."""
        self.under_way = False
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting.clear()

    async def ended(self) -> None:
        """Returns when nothing is being copied."""
        if self.under_way:
            self._waiting.append(waiting := asyncio.get_running_loop().create_future())
            await waiting


class LastChanges:
    """When each parameter slice of a model was changed last, in changes counted from 1.

    Called on the shard's event loop, in the order in which changes are decided. Where every slice changes, as is usual,
    neither recording nor asking costs anything per slice.
    """

    def __init__(self, layout: Layout) -> None:
        #: Changes recorded so far.
        self.number = 0
        #: The last one that changed all slices, and of each slice the last that did not.
        self.all = 0
        self._some = np.zeros(layout.parameter_slices, np.int64)

    def record(self, untouched: frozenset[int] | None) -> None:
        """One change of all slices but ``untouched``; None: of no slice."""
        if untouched is None:
            return
        self.number += 1
        if not untouched:
            self.all = self.number
            return
        changed = np.ones(len(self._some), bool)
        changed[np.fromiter(untouched, np.int64, len(untouched))] = False
        self._some[changed] = self.number

    def unchanged_since(self, number: int) -> tuple[int, ...]:
        """Slices that no change after ``number`` has changed, rising."""
        if self.all > number:
            return ()
        return tuple(np.flatnonzero(self._some <= number).tolist())


class UnchangedSlices:
    """What the worker of one stream holds. Used by the stream's writer, on the event loop."""

    def __init__(self, changes: LastChanges, *, keeps: bool, differences: bool) -> None:
        """``keeps``: the worker keeps anything. ``differences``: its wire format brings a slice bit by bit, so that
        one is whole only when it came raw.
        """
        self._changes = changes
        self._keeps = keeps
        self._differences = differences
        #: The worker holds every slice as it was after this change; None: it need not hold anything.
        self._number: int | None = None

    def unchanged(self) -> tuple[int, ...]:
        """Slices that need not be sent."""
        number, changes = self._number, self._changes
        return () if number is None or changes.all > number else changes.unchanged_since(number)

    def sent(self, number: int, *, raw: bool) -> None:
        """An answer went out with all changes up to ``number``; ``raw``: whole, in place of the wire format."""
        if self._keeps and (raw or not self._differences):
            self._number = number
