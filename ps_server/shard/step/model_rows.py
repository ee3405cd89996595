"""The rows of one model's tables: looked up, written and dropped between its updates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ps_protocol.errors import DamagedData
from ps_protocol.model.tables import Ids
from ps_server.consistency import WorkerKey
from ps_server.log.entries import RowsEntry
from ps_server.log.messages import bytes_of
from ps_server.shard.step.applier import EXPIRY_BYTES, Applier
from ps_server.shard.step.push import IncomingPush
from ps_server.shard.step.pushed_rows import WantedRows

if TYPE_CHECKING:
    from ps_server.tables.table import ShardTable

T = TypeVar("T")

PREPARED_BYTES = 128 << 10
"""A push of fewer bytes of rows takes less time than preparing it."""


class ModelRows:
    """Part of one ShardModel, on the shard's event loop."""

    def __init__(
        self,
        applier: Applier,
        held: Mapping[tuple[WorkerKey, int], IncomingPush],
        is_pending: Callable[[], bool],
    ) -> None:
        """``held``: accepted pushes whose step is still open. ``is_pending``: see ShardModel."""
        self._applier = applier
        self._held = held
        self._is_pending = is_pending

    def held_ids(self, table: int) -> list[Ids]:
        """The ids of one table in pushes whose step is still open."""
        rows = (push.rows for push in self._held.values() if push.rows)
        return [part.ids for pushed in rows for part in pushed.parts if part.table == table]

    async def look_up(
        self, wanted: WantedRows, room: memoryview | None = None, *, for_push: bool = False
    ) -> tuple[int, memoryview]:
        """The version after everything decided so far, and of that the rows wanted, float32, table by table.

        ``room``: where they are written; None: in memory of their own. ``for_push``: expect gradients of them.
        Raises InvalidRequest for ids of another shard.
        """
        self._applier.gate.check()
        into = np.empty(wanted.rows_bytes // 4, np.float32) if room is None else np.frombuffer(room, np.float32)
        version, values = self._applier.tracker.version, self._applier.look_up(wanted.parts, into)
        if for_push and wanted.rows_bytes >= PREPARED_BYTES:
            self._prepare(wanted)
        try:
            rows = await values
        except DamagedData:
            self._applier.gate.check()
            raise
        await self._applier.covered()
        self._applier.gate.check()
        return version, bytes_of(rows)

    def _prepare(self, wanted: WantedRows) -> None:
        """Queue what a push of the rows ``wanted`` would have to do first, to be done while its worker computes.

        In pieces of about a millisecond, for other work waits for the end of one. What one of them fails at the push
        fails at, too, and the push reports it.
        """
        loop, left = asyncio.get_running_loop(), list(wanted.parts)

        def work(tables: Sequence[ShardTable]) -> Callable[[], None] | None:
            number, ids = left[-1]
            ahead = tables[number].memory_ahead(ids)
            if not tables[number].prepare(ids):
                left.pop()
            return ahead

        def go_on(done: asyncio.Future[Callable[[], None] | None]) -> None:
            if done.cancelled() or done.exception() is not None:
                return
            if (ahead := done.result()) is not None:
                loop.run_in_executor(None, ahead)
            if left and not self._applier.gate.closed:
                begin()

        def begin() -> None:
            with suppress(RuntimeError):  # the executor has been closed: the shard ends
                self._applier.with_tables(work).add_done_callback(go_on)

        begin()

    async def write(
        self, entry: RowsEntry, nbytes: int, *, at_cut: bool = False, check: Callable[[], None] | None = None
    ) -> None:
        """Write or drop rows, for about ``nbytes`` of log. Raises StorageFull, or what stopped the model.

        ``at_cut``: also while the model is paused; others wait until it resumes. ``check`` is called when nothing is
        waited for any more before it is written, and may refuse it.
        """
        await self._applier.reserve(nbytes, at_cut=at_cut, check=check)
        await asyncio.shield(self._applier.write_rows(entry, nbytes, self._applier.tracker.version))
        await self._applier.covered()
        self._applier.gate.check()

    async def expire(self, table: int, now: float) -> bool:
        """Drop a batch of rows of ``table``, where some have expired; whether any were. Raises StorageFull.

        ``now``: seconds of the day's clock.
        """
        if not self._applier.replica.tables[table].ages:
            return False
        await self._applier.log.reserve(EXPIRY_BYTES)
        if self._applier.gate.paused or self._applier.gate.closed or self._is_pending():
            self._applier.log.release(EXPIRY_BYTES)
            return False
        return await self._applier.expire(table, now, self.held_ids(table), self._applier.tracker.version)

    async def read(self, work: Callable[[Sequence[ShardTable]], T]) -> T:
        """The result of ``work`` with the tables, between two updates: it reads them, and may take its time."""
        return await self._applier.gate.guard(lambda: self._applier.with_tables(work))
