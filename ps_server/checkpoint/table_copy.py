"""Copies one table for a checkpoint: all of it, or the changes since an earlier checkpoint."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ps_protocol.model.ids import buckets_of
from ps_protocol.model.tables import Ids, TableSpec
from ps_server.checkpoint.record import Base, Mark
from ps_server.tables.store import Columns

if TYPE_CHECKING:
    from ps_server.tables.paged_rows import KeptRows
    from ps_server.tables.table import ShardTable

#: Limits of one step, in bytes copied and rows scanned: at most a few tens of milliseconds.
STEP_BYTES = 16 << 20
_STEP_ROWS = 1 << 20

ORDER_BYTES = 18
"""To write a row: the number of its bucket, its place in the order by bucket, and one more while that is sorted."""

_NO_IDS: Ids = np.empty(0, np.int64)
#: Numbers of rows; None: all.
_Chosen = npt.NDArray[np.int64] | None


class TableCapture:
    """A copy of one table of one shard. The executor calls ``step`` repeatedly, while nothing changes the
    table; what it has copied is read by any thread afterwards.

    It needs memory for the copied rows; they are copied in the order of memory, and sorted when written. Rows on disk
    are not copied: their file keeps them as they are until this object is not referenced.
    """

    def __init__(self, table: ShardTable, since: tuple[Mark, Base] | None) -> None:
        """Called by the executor. ``since``: the state in an earlier checkpoint, which is not copied; None: copy all.

        Everything is copied as well when those deletions are no longer known, or more than half of the rows changed.
        """
        self.spec = table.spec
        #: By bucket: whether it is here, and whether it is copied in full.
        self.here = table.here.copy()
        self.whole = np.ones(self.spec.buckets, np.bool_)
        #: Ids deleted since then, ascending; without buckets that are copied in full.
        self.deleted = self.waiting_deleted = _NO_IDS
        self.rows, self.waiting = (_room(columns, 0) for columns in table.views())
        self._kept: KeptRows | None = None
        self._since: Mark | None = since[0] if since else None
        self._base = since[1] if since else None
        self._now = table.updates, table.changes, table.waiting_changes
        self._steps = self._run(table)

    def step(self) -> bool:
        """Copy a piece. Returns whether there is more to do."""
        return next(self._steps, True) is None

    @property
    def base(self) -> Base | None:
        """The checkpoint that this copy builds on; None: it is complete."""
        return self._base if self._since else None

    @property
    def updates(self) -> int:
        """Updates of the table so far."""
        return self._now[0]

    def mark(self) -> Mark:
        """The argument ``since`` of the next copy, once this one is in a checkpoint."""
        return Mark(*self._now, self._since.depth + 1 if self._since else 0)

    def values(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Values and state of the ``numbers``-th of ``rows``: from its file where a row is not in memory.

        Raises DamagedData.
        """
        return self._kept.read(numbers) if self._kept is not None else np.take(self.rows.rows, numbers, 0)

    def _run(self, table: ShardTable) -> Generator[None]:
        rows, waiting = table.views()
        chosen: tuple[_Chosen, _Chosen] = None, None
        gone, waiting_gone = self._gone(table)
        if self._since:
            self.whole = table.arrived > self._since.changes
            chosen = (yield from self._touched(rows)), (yield from self._touched(waiting))
        if chosen[0] is not None and 2 * chosen[0].size > rows.ids.size:
            self._since, chosen = None, (None, None)
        if self._since is None:
            self.whole[:] = True
        self.deleted, self.waiting_deleted = self._of_increments(gone), self._of_increments(waiting_gone)
        self._kept = table.keep_values(chosen[0])
        yield
        self.rows = yield from _copied(rows, chosen[0])
        self.waiting = yield from _copied(waiting, chosen[1])

    def _gone(self, table: ShardTable) -> tuple[Ids, Ids]:
        if self._since is None:
            return _NO_IDS, _NO_IDS
        gone = table.deletions_since(self._since.changes)
        waiting_gone = table.waiting_deletions_since(self._since.waiting_changes)
        if gone is None or waiting_gone is None:
            self._since = None
            return _NO_IDS, _NO_IDS
        return np.unique(gone), np.unique(waiting_gone)

    def _touched(self, columns: Columns) -> Generator[None, None, npt.NDArray[np.int64]]:
        since = self._since.updates if self._since else 0
        found = [_NO_IDS]
        for begin in range(0, columns.ids.size, _STEP_ROWS):
            piece = slice(begin, begin + _STEP_ROWS)
            mask = columns.touched[piece] > since
            if self.whole.any():
                mask |= self.whole[buckets_of(columns.ids[piece], self.spec.buckets)]
            found.append(begin + np.flatnonzero(mask))
            yield
        return np.concatenate(found)

    def _of_increments(self, ids: Ids) -> Ids:
        wanted: npt.NDArray[np.bool_] = self.here & ~self.whole
        found: Ids = ids[wanted[buckets_of(ids, self.spec.buckets)]]
        return found


def _room(like: Columns, rows: int) -> Columns:
    return Columns(
        np.empty(rows, np.int64),
        np.empty(rows, np.int64),
        np.empty((rows, like.rows.shape[1]), np.float32),
        np.empty(rows if like.uses.size else 0, np.uint32),
    )


def copy_bytes(spec: TableSpec, rows: int, in_memory: int, *, paged: bool) -> int:
    """Memory of a copy of so many rows, all there are, of which ``in_memory`` are in memory, while it is written."""
    row_bytes = 16 + 4 * spec.life.counts_uses + ORDER_BYTES
    if paged:
        row_bytes += 16  # Of KeptRows: id and place.
    return row_bytes * rows + 4 * spec.width * in_memory


def _row_bytes(columns: Columns) -> int:
    width: int = columns.rows.shape[1]
    return 16 + 4 * width + 4 * bool(columns.uses.size)


def _copied(source: Columns, chosen: _Chosen) -> Generator[None, None, Columns]:
    count = source.ids.size if chosen is None else chosen.size
    made = _room(source, count)
    pairs: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = [
        (source.ids, made.ids),
        (source.touched, made.touched),
        (source.rows, made.rows),
        (source.uses, made.uses),
    ]
    pairs = [(have, into) for have, into in pairs if into.size]
    rows = max(1, STEP_BYTES // _row_bytes(source))
    for begin in range(0, count, rows):
        piece = slice(begin, min(begin + rows, count))
        for have, into in pairs:
            if chosen is None:
                into[piece] = have[piece]
            else:
                np.take(have, chosen[piece], 0, into[piece], "clip")
        yield
    return made
