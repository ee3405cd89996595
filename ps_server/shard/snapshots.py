"""Snapshots: a model's region as it was at one version, copied once and read by every reply of that version."""

from __future__ import annotations

import asyncio

from ps_server.optimizers import Region
from ps_server.shard.lane import Lane
from ps_server.shard.pool import RegionPool


class Snapshot:
    """Taken, awaited and given back on the event loop; filled by the lane. Its region goes back with its last taker.

    So no reply is ever torn: its bytes do not change while it is sent, however long the reader takes.
    """

    def __init__(self, source: Region, version: int, lane: Lane, pool: RegionPool) -> None:
        self.version = version
        self._pool = pool
        #: The copy itself is the first taker: the region is not given back under its hands.
        self.takers = 1
        self.copied: asyncio.Future[Region] = lane.submit(lambda: _copy(source, pool), len(source.bytes))
        self.copied.add_done_callback(lambda _: self.give_back())

    @property
    def region(self) -> Region:
        """The copy; valid once ``copied`` is done."""
        return self.copied.result()

    def give_back(self) -> None:
        """One taker less."""
        self.takers -= 1
        if self.takers == 0 and self.copied.done() and not self.copied.cancelled() and not self.copied.exception():
            self._pool.give(self.copied.result())


def _copy(source: Region, pool: RegionPool) -> Region:
    target = pool.take()
    copy_region(source, target)
    return target


def copy_region(source: Region, target: Region) -> None:
    """Copy all bytes, with the interpreter lock released."""
    target.data.copy_(source.data)
