"""One model's replica while it is trained: changed in the executor, copied there, and read as it was published."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import InternalError
from ps_protocol.model.layout import Layout
from ps_protocol.model.tables import Ids
from ps_server.log.entries import UpdateLog
from ps_server.optimizers.state import StateEntry
from ps_server.shard.execution.executor import INLINE_BYTES, ShardExecutor
from ps_server.shard.step.published import CopyInProgress, LastChanges, Published
from ps_server.shard.step.rows.pushed_rows import ROW_COST_BYTES
from ps_server.state.blocks import Block
from ps_server.state.bucket_groups import Group, Wanted, copy_group
from ps_server.state.region import Region, RegionPool
from ps_server.state.replica import Replica

if TYPE_CHECKING:
    from ps_server.tables.table import ShardTable

T = TypeVar("T")

COPY_BYTES_PER_SECOND = 5e8
"""Into memory that is touched for the first time."""

QUICK_SECONDS = 200e-6
"""A change that took less the last time is made on the event loop, where nobody reads the region."""

QUICK_BYTES = 2 << 20
"""A region above this size is changed in the executor's thread in any case."""

UNUSED_PART = 8
"""After moves a region may hold an eighth more memory than it needs."""


def _leave(replica: Replica, target: Region) -> None:
    """Continue in ``target``; readers of the region before it keep that."""
    replica.move(target)


class WorkingCopy:
    """Used by one ShardModel, on the shard's event loop; what it queues in the executor is done in that order."""

    def __init__(self, replica: Replica, version: int, executor: ShardExecutor, log: UpdateLog) -> None:
        """``replica`` is this one's until ``take``; it holds ``version``."""
        self.layout = replica.layout
        self.pool = RegionPool(replica.layout)
        self._replica: Replica | None = replica
        self._executor = executor
        self._log = log
        self.copies = CopyInProgress()
        #: What the last change took; written in the executor.
        self._change_seconds = math.inf
        #: Of the values: recorded when a change is decided, before it is done.
        self.last_changes = LastChanges(replica.layout)
        ready: asyncio.Future[Region] = asyncio.get_running_loop().create_future()
        ready.set_result(replica.region)
        self._newest: Published | None = Published(version, ready, self.pool)

    @property
    def newest(self) -> Published:
        """The newest version decided; its bytes are there once the executor has done the work queued for it."""
        if self._newest is None:
            raise self._taken()
        return self._newest

    @property
    def replica(self) -> Replica:
        """Changed in the executor only."""
        if self._replica is None:
            raise self._taken()
        return self._replica

    def unread(self) -> Callable[[], bool]:
        """For the executor, once this was handed on: whether nobody reads the region any more.

        It waits for readers as long as a copy of the region might take, where it is not called on the event loop.
        """
        newest, size_bytes = self.newest, self.layout.region_bytes
        patience_seconds = size_bytes / COPY_BYTES_PER_SECOND if size_bytes >= INLINE_BYTES else 0.0
        return lambda: newest.unread(patience_seconds)

    @property
    def table_list(self) -> Sequence[ShardTable]:
        """The model's tables; none once it was handed on."""
        return self._replica.tables if self._replica is not None else ()

    def take(self) -> Replica:
        """Hand the replica on. Readers of its region are not disturbed."""
        replica = self.replica
        self._replica = self._newest = None
        return replica

    async def compact(self) -> None:
        """Give back memory of slices that have left; continue in a smaller region where that takes one.

        Nobody changes the layout meanwhile. Raises OSError, MemoryError where there is no memory for both.
        """
        replica = self.replica
        await asyncio.wait([self._executor.submit(replica.trim, 0)])
        if self.replica.region.unused_bytes <= self.layout.region_bytes // UNUSED_PART:
            return
        target = await asyncio.to_thread(Region, self.layout)
        if self._replica is not None:
            version = self.newest.version
            await asyncio.wait([self.change(version, lambda replica: _leave(replica, target), untouched=None)])

    def touch(self, layout: Layout) -> None:
        """In a helper thread: have memory for the next ``layout``. Raises OSError."""
        if (replica := self._replica) is not None:
            replica.touch(layout)
        self.pool.touch(layout.region_bytes)

    def change(
        self,
        version: int,
        work: Callable[[Replica], None],
        cost: int = 0,
        *,
        untouched: frozenset[int] | None = frozenset(),
    ) -> asyncio.Future[Region]:
        """Queue work that makes ``version``; readers of the version before it are not disturbed.

        ``cost``: bytes that could be moved in the time it takes, beside those of the region. ``untouched``: indexes of
        parameter slices that it does not change; None: it changes none at all.
        """
        self.last_changes.record(untouched)
        before, replica, loop = self.newest, self.replica, asyncio.get_running_loop()
        nbytes = max(self.layout.region_bytes + cost, INLINE_BYTES * self._log.waits)
        is_undisturbed = before.takers == 0 and not self._log.waits
        quick = is_undisturbed and nbytes <= QUICK_BYTES and self._change_seconds < QUICK_SECONDS

        def change() -> Region:
            # Nobody takes ``before`` any more: its takers only become fewer.
            if before.still_read(patient=not quick and nbytes >= INLINE_BYTES):
                self.copies.begin()
                try:
                    replica.move(self.pool.take())
                    loop.call_soon_threadsafe(before.leave_to_readers)
                finally:
                    loop.call_soon_threadsafe(self.copies.end)
            began = time.perf_counter()
            work(replica)
            self._change_seconds = time.perf_counter() - began
            return replica.region

        made = self._executor.submit(change, nbytes, quick=quick)
        self._newest = Published(version, made, self.pool)
        return made

    def state(self, slices: Collection[int] | None = None) -> asyncio.Future[list[StateEntry]]:
        """A copy of the optimizer state, whole or of these slices, after everything decided so far."""
        replica = self.replica
        return self._executor.submit(lambda: replica.state(slices), self.layout.region_bytes)

    def look_up(
        self, wanted: Sequence[tuple[int, Ids]], values: npt.NDArray[np.float32]
    ) -> asyncio.Future[npt.NDArray[np.float32]]:
        """Write rows of some tables to ``values``, in the order of the ids, after everything decided so far.

        The future holds InvalidRequest for an id of another shard.
        """
        tables = self.replica.tables

        def work() -> npt.NDArray[np.float32]:
            at = 0
            for table, ids in wanted:
                end = at + ids.size * tables[table].spec.dim
                tables[table].check_here(ids)
                tables[table].look_up(ids, values[at:end].reshape(ids.size, tables[table].spec.dim))
                at = end
            return values

        rows = sum(ids.size for _, ids in wanted)
        return self._executor.submit(work, rows * ROW_COST_BYTES)

    def number(self) -> asyncio.Future[int]:
        """The last record of the log when everything decided so far has been done."""
        return self._executor.submit(lambda: self._log.number, 0)

    def copy_block(self, block: Block, into: memoryview) -> asyncio.Future[tuple[int, memoryview, list[StateEntry]]]:
        """A copy of one block, made between two updates: the last record it contains, values, optimizer state."""
        replica = self.replica

        def work() -> tuple[int, memoryview, list[StateEntry]]:
            return self._log.number, *replica.copy_block(block, into)

        return self._executor.submit(work, block.end - block.begin)

    def copy_buckets(self, wanted: Wanted) -> asyncio.Future[tuple[int, Group]]:
        """Copies of the next buckets of ``wanted``, made between two updates: the last record in them, and these."""
        tables = self.replica.tables

        def work() -> tuple[int, Group]:
            return self._log.number, copy_group(tables, wanted)

        return self._executor.submit(work, INLINE_BYTES)

    def with_tables(self, work: Callable[[Sequence[ShardTable]], T]) -> asyncio.Future[T]:
        """The result of ``work`` with the tables, between two updates: it reads them, and may take its time."""
        tables = self.replica.tables
        return self._executor.submit(lambda: work(tables), INLINE_BYTES)

    def _taken(self) -> InternalError:
        name = self.layout.shard_map.spec.name
        return InternalError(f"model '{name}' is used after it was handed on", shard=str(self.layout.shard))
