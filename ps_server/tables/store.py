"""Rows by id: dense columns of ids, last uses, values and use counts, and the maps from id to row."""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import InternalError, TableFull
from ps_protocol.model.ids import buckets_of, unique
from ps_protocol.model.tables import Ids
from ps_server.tables import id_map, memory
from ps_server.tables.arrays import Reserved, machine_bytes, zeroed
from ps_server.tables.id_map import NO_END, scratch
from ps_server.tables.paged_rows import KeptRows, PagedRows
from ps_server.tables.row_memory import RowMemory

#: Lookups that are kept, for as many workers; and the most ids of one.
_KEPT = 4
_MOST_IDS = 1 << 17


@dataclass(slots=True, eq=False)
class RecentLookup:
    """Ids that were looked up, and what is known of them."""

    ids: Ids
    #: The row of each; None where some had none.
    found: npt.NDArray[np.int64] | None
    missing: int
    #: No id comes twice; None: not known yet.
    distinct: bool | None = None
    #: Maps that are to grow before its ids are inserted, and rows of each then; None: not known yet.
    growing: list[tuple[int, int]] | None = None


class RecentLookups:
    """The last lookups of one RowStore: a worker pushes to rows that it has just pulled.

    Rows keep their numbers until one is removed; then the store calls ``forget``.
    """

    def __init__(self) -> None:
        self._kept: deque[RecentLookup] = deque(maxlen=_KEPT)

    def keep(self, ids: Ids, found: npt.NDArray[np.int64], missing: int) -> None:
        """``found``: the row of each of ``ids``, -1 for so many ``missing`` ones; not written from now on."""
        if 0 < ids.size <= _MOST_IDS:
            self._kept.append(RecentLookup(ids.copy(), None if missing else found, missing))

    def take(self, ids: Ids) -> npt.NDArray[np.int64] | None:
        """The row of each id, to be read only, where these very ids were looked up and had one.

        They are not kept any longer.
        """
        if (known := self.of(ids)) is None:
            return None
        self._kept.remove(known)
        return known.found

    def forget(self) -> None:
        """Rows are removed: others get their numbers."""
        self._kept.clear()

    def of(self, ids: Ids) -> RecentLookup | None:
        """That of these very ids."""
        for known in self._kept:
            if known.ids.size == ids.size and known.ids[0] == ids[0] and np.array_equal(known.ids, ids):
                return known
        return None


#: Memory is returned when this many rows, and an eighth of the highest number of rows, have been removed.
_KEPT_ROWS = 4096
_FULLEST = 0.85
_EMPTIEST = 0.3
_GROWTH = 1.5
_SMALLEST = 8
#: A map of this size is never made smaller.
_ALWAYS_KEPT = 64
#: Its multiples, modulo 1, are evenly distributed in [0, 1).
_GOLDEN = 0.6180339887498949
MAX_ROWS = (1 << 32) - 1
"""The numbers of rows fit 32 bits."""
#: Of a map: a row number and a tag.
_PLACE_BYTES = 5
#: Entries of maps that are moved in one piece of ``prepare``, and those of one map more: about a millisecond.
_MOVED_AT_ONCE = 1 << 14
_FEWEST_ROWS = 1 << 20
_NO_VALUES = np.empty((0, 0), np.float32)
_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Columns:
    """Copied rows. Arrays of equal length; ``rows`` [n, width]; ``uses`` zeros if they are not kept."""

    ids: Ids
    touched: npt.NDArray[np.int64]
    rows: npt.NDArray[np.float32]
    uses: npt.NDArray[np.uint32]


class RowStore:
    """Rows [0, count) by id. Owned by one ShardTable, used by the executor, one call at a time.

    Columns are never copied to grow. Maps grow one by one, buckets with as many ids at different numbers of them; so an
    insertion waits for a few maps at most. Which row an id has depends on what came before; nothing else may depend on
    it.

    With a ``RowMemory``, values and state of a row are in a slot of memory or on disk, and its number is not its place:
    ``places`` brings rows to memory and says where they are. Everything else is the same.
    """

    def __init__(
        self, buckets: int, width: int, *, with_uses: bool, memory: RowMemory | None = None, name: str = ""
    ) -> None:
        """``width`` is float32 numbers per row. ``memory``: rows may be on disk; ``name`` is for messages.

        Raises TableFull when the system has no address space.
        """
        #: Bytes of a row that are in memory in any case.
        self._row_bytes = index_row_bytes(width, with_uses=with_uses, on_disk=memory is not None)
        self.count = 0
        self._most = 0
        #: Rows below this number have memory, or soon will.
        self._populated = 0
        most = min(MAX_ROWS, machine_bytes() // self._row_bytes)
        self._reserved = _reserve(most, (1, np.int32) if memory else (width, np.float32), with_uses)
        ids, touched, values, uses = (column.array for column in self._reserved)
        #: int64 [capacity], of which [:count] live, as in all columns.
        self.ids: npt.NDArray[np.int64] = ids[:, 0]
        self.touched: npt.NDArray[np.int64] = touched[:, 0]
        #: float32 [places, width]
        self.rows: npt.NDArray[np.float32] = values
        #: uint32 [capacity], or [0] where uses are not kept.
        self.uses: npt.NDArray[np.uint32] = uses.reshape(-1)
        self.capacity = self.ids.size
        #: Rows of each bucket.
        self.counts = np.zeros(buckets, np.int64)
        #: Prevents long searches with chosen ids.
        self._salt = np.uint64(secrets.randbits(64) | 1)
        self._nothing = zeroed(_PLACE_BYTES)
        self._blocks: dict[int, npt.NDArray[Any]] = {}
        self._addresses = np.full(buckets, self._nothing.ctypes.data, np.int64)
        self._capacities = np.ones(buckets, np.int64)
        self._map_bytes = 0
        self._recent = RecentLookups()
        self.paged: PagedRows | None = None
        if memory is not None:
            self.paged = PagedRows(memory, name, self.ids, values[:, 0], buckets, width, self)
            self.rows = self.paged.values
            # What moves when a row's number changes.
            self._moving = values.view(np.float32)
        else:
            self._moving = values

    @property
    def size_bytes(self) -> int:
        """Bytes of rows and maps, in memory and on disk."""
        return self.index_bytes + (4 * self.count * int(self.rows.shape[1]) if self.paged else 0)

    @property
    def index_bytes(self) -> int:
        """Bytes of what is in memory of all rows, wherever their values are, and of the maps."""
        return self.count * self._row_bytes + self._map_bytes

    def find(self, ids: Ids) -> npt.NDArray[np.int64]:
        """The row of each id, -1 where it has none."""
        return self._find(ids, _NO_VALUES)[0]

    def look_up(self, ids: Ids, out: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        """Write values to ``out``, float32 [n, columns], as many columns as it has; returns which ids have no row.

        An ``insert`` of the same ids, which often comes next, does not search again.
        """
        found, missing = self._find(ids, _NO_VALUES if self.paged else out)
        if self.paged is not None:
            self.paged.look_up(found, out)
        self._recent.keep(ids, found, missing)
        return np.flatnonzero(found < 0) if missing else _NO_ROWS

    def _find(self, ids: Ids, out: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int64], int]:
        found = np.empty(ids.size, np.int64)
        maps = self._salt, self._addresses, self._capacities
        return found, _ended(id_map.find(ids, *maps, self.ids, self.rows, found, out, scratch()))

    def insert(self, ids: Ids, touched: int) -> npt.NDArray[np.int64]:
        """The row of each id, without duplicates, to be read only; new rows get the numbers from ``count``, in order.

        Of new rows the last use is ``touched``, uses are 0, and the caller writes the values. Raises TableFull before
        anything changes, which it may when hardly any memory is left even if few ids are new.
        """
        if (known := self._recent.take(ids)) is not None:
            return known
        first, found = self._insert(ids, touched, are_new=False)
        if self.paged is not None and first < self.count:
            try:
                for piece in self.paged.pieces(self.count - first):
                    self.paged.add(first + piece.start, piece.stop - piece.start)
            except BaseException:
                self._take_back(first)
                raise
        return found

    def _take_back(self, first: int) -> None:
        """Remove the new rows from ``first`` on, of which some may have no place yet."""
        if self.paged is not None:
            self.paged.leave(np.arange(first, self.paged.count))
            self._remove(self.ids[first : self.count].copy())
            self.paged.moved(_NO_ROWS, self.count)

    def _insert(self, ids: Ids, touched: int, *, are_new: bool) -> tuple[int, npt.NDArray[np.int64]]:
        """The first new row and the row of each id; new ones have no place yet. ``are_new``: all are."""
        self.room_for(ids.size)
        for bucket, rows in self._too_small(ids, are_new=are_new):
            self._resize(bucket, rows)
        found = np.empty(ids.size, np.int64)
        first = self.count
        self.count = _ended(
            id_map.insert(
                ids, self._salt, first, self._addresses, self._capacities, self.counts, self.ids, found, scratch()
            )
        )
        self._most = max(self._most, self.count)
        self.touched[first : self.count] = touched
        if self.uses.size:
            self.uses[first : self.count] = 0
        return first, found

    def places(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where the values of ``rows`` are in ``self.rows``, to be changed before the next call; -1 for -1.

        At most as many as one of ``pieces`` has. Raises DamagedData for a row that cannot be read from disk.
        """
        return rows if self.paged is None else self.paged.slots(rows, write=True)

    def pieces(self, count: int) -> Iterator[slice]:
        """``count`` rows in pieces that are in memory together."""
        return iter((slice(0, count),)) if self.paged is None else self.paged.pieces(count)

    def write(self, columns: Columns) -> None:
        """Add copied rows, for ids without one. Raises TableFull before anything changes."""
        rows = slice(self.count, self.count + columns.ids.size)
        self._insert(columns.ids, 0, are_new=True)
        self.touched[rows] = columns.touched
        if self.paged is not None:
            try:
                self.paged.write(rows.start, columns.rows)
            except BaseException:
                self._take_back(rows.start)
                raise
        elif self.rows.size:
            self.rows[rows] = columns.rows
        if self.uses.size:
            self.uses[rows] = columns.uses

    def touch(self, rows: npt.NDArray[np.int64], update: int) -> None:
        """Note a use of these rows, each once, in this update."""
        memory.touch(self.touched, self.uses, rows, update)

    def room_for(self, rows: int) -> None:
        """Raises TableFull if so many more rows do not fit into the memory of this machine."""
        if self.count + rows > self.capacity:
            raise TableFull(
                "a table has no room for more rows in the memory of this machine",
                expected=f"at most {self.capacity} rows of {self._row_bytes} bytes",
                actual=f"{self.count} and {rows} new ones",
                remedy="use more shards, or limit the table by max_rows",
            )

    def remove(self, ids: Ids) -> None:
        """Remove ids that have a row, each once. Memory is returned once much is free."""
        if self.paged is not None:
            rows = self.find(ids)
            self.paged.leave(rows)
            self._remove(ids)
            self.paged.moved(rows, self.count)
        else:
            self._remove(ids)

    def _remove(self, ids: Ids) -> None:
        self._recent.forget()
        columns = self.ids, self.touched, self.uses, self._moving
        _ended(id_map.remove(ids, self._salt, self.count, self._addresses, self._capacities, self.counts, *columns))
        self.count -= ids.size
        empty = (self._capacities > _ALWAYS_KEPT) & (self.counts < _EMPTIEST * self._capacities)
        for bucket in np.flatnonzero(empty):
            self._resize(int(bucket), int(self.counts[bucket]))
        if self._most - self.count > max(_KEPT_ROWS, self._most // 8):
            for column in self._reserved:
                column.give_back(self.count, max(self._most, self._populated))
            self._most = self._populated = self.count

    def view(self) -> Columns:
        """All rows, not copied: valid until the next change. Without values where rows may be on disk: ``keep``."""
        in_memory = self.rows.size and self.paged is None
        rows = self.rows[: self.count] if in_memory else np.empty((self.count, 0), np.float32)
        return Columns(self.ids[: self.count], self.touched[: self.count], rows, self.uses[: self.count])

    def of_bucket(self, bucket: int, since: int = -1) -> npt.NDArray[np.int64]:
        """The rows of one bucket used after update ``since``, ascending by id: the order does not depend on the
        history.
        """
        found = np.empty(self.counts[bucket], np.int64)
        if found.size:
            _ended(id_map.rows_of(self._addresses[bucket], self._capacities[bucket], found))
        if since >= 0:
            found = found[self.touched[found] > since]
        return found[np.argsort(self.ids[found])]

    def keep(self, rows: npt.NDArray[np.int64] | None) -> KeptRows | None:
        """The values of these rows, None: of all, as they are now, where they may be on disk; else None."""
        if self.paged is None:
            return None
        return self.paged.keep(np.arange(self.count) if rows is None else rows)

    def copy(self, rows: npt.NDArray[np.int64]) -> Columns:
        """These rows as they are now."""
        values = np.empty((rows.size, self.rows.shape[1]), np.float32)
        if self.paged is not None:
            self.paged.read(rows, values)
        else:
            memory.read(self.rows, rows, values)
        return Columns(
            self.ids[rows],
            self.touched[rows],
            values,
            self.uses[rows] if self.uses.size else np.zeros(rows.size, np.uint32),
        )

    def prepare(self, ids: Ids) -> bool:
        """Do a part of what an ``insert`` of ``ids``, which were just looked up, would do; whether more is left.

        The content of the store does not change; the ``insert`` takes less time.
        """
        if (known := self._recent.of(ids)) is None:
            return False
        if known.distinct is None:
            known.distinct = bool(unique(ids)[0].size == ids.size)
            return known.distinct and known.missing > 0
        if known.growing is None:
            known.growing = self._too_small(ids, are_new=False)
        moved = 0
        while known.growing and moved < _MOVED_AT_ONCE:
            bucket, rows = known.growing.pop()
            if rows > _FULLEST * self._capacities[bucket]:
                self._resize(bucket, rows)
                moved += 1 + int(self.counts[bucket])
        return bool(known.growing)

    def are_distinct(self, ids: Ids) -> bool:
        """Whether it is known that no id comes twice, by ``prepare``."""
        return (known := self._recent.of(ids)) is not None and bool(known.distinct)

    def memory_ahead(self, ids: Ids) -> Callable[[], None] | None:
        """What gets memory for the rows that an ``insert`` of ``ids``, which were just looked up, will add, and some
        more; to be called in any thread. None: it is there.
        """
        coming = known.missing if (known := self._recent.of(ids)) else 0
        if not coming or self.count + coming <= self._populated:
            return None
        begin = max(self.count, self._populated)
        end = min(self.capacity, self.count + coming + min(coming, self.count // 8))
        self._populated, columns = end, self._reserved

        def populate() -> None:
            for column in columns:
                column.populate(begin, end)

        return populate

    def _too_small(self, ids: Ids, *, are_new: bool) -> list[tuple[int, int]]:
        """The buckets whose maps are too small for the new ones among ``ids``, and how many rows each will have."""
        buckets = buckets_of(ids, self.counts.size)
        full = _FULLEST * self._capacities
        tight = self.counts + np.bincount(buckets, minlength=full.size) > full
        if not tight.any():
            return []
        of_tight = np.flatnonzero(tight[buckets])
        new = of_tight if are_new else of_tight[self.find(ids[of_tight]) < 0]
        needed = self.counts + np.bincount(buckets[new], minlength=full.size)
        return [(int(bucket), int(needed[bucket])) for bucket in np.flatnonzero(needed > full)]

    def _resize(self, bucket: int, rows: int) -> None:
        capacity = map_capacity(bucket, rows)
        block = zeroed(_PLACE_BYTES * capacity)
        if self.counts[bucket]:
            old = self._addresses[bucket], self._capacities[bucket]
            _ended(id_map.rehash(self._salt, *old, block.ctypes.data, capacity, self.ids, scratch()))
        self._map_bytes += block.nbytes - (self._blocks[bucket].nbytes if bucket in self._blocks else 0)
        self._blocks[bucket] = block
        self._addresses[bucket] = block.ctypes.data
        self._capacities[bucket] = capacity


def _ended(answer: int) -> int:
    """The result of a function of ``id_map``. Raises InternalError for a damaged map."""
    if answer == NO_END:
        raise InternalError(
            "a map of a table's rows is damaged: a search in it does not end",
            remedy="start this shard again: it reads its rows from its data directory",
        )
    return int(answer)


def _reserve(rows: int, values: tuple[int, npt.DTypeLike], with_uses: bool) -> list[Reserved]:
    """Columns of ids, last uses, values (width and type) or their places, and uses; for fewer rows if the system lacks
    the address space for all.
    """
    while True:
        try:
            return [
                Reserved(rows, 1, np.int64),
                Reserved(rows, 1, np.int64),
                Reserved(rows, *values),
                Reserved(rows, int(with_uses), np.uint32),
            ]
        except TableFull:
            if rows < _FEWEST_ROWS:
                raise
            rows //= 2


def index_row_bytes(width: int, *, with_uses: bool, on_disk: bool) -> int:
    """Bytes of a row that are in memory in any case: id, last use, the values or their place, uses."""
    return 8 + 8 + (4 if on_disk else 4 * width) + 4 * with_uses


def maps_bytes(buckets: int, rows: int) -> int:
    """Bytes of the maps of so many buckets, which have ``rows`` together, about evenly."""
    each = -(-rows // buckets)
    return sum(_PLACE_BYTES * map_capacity(bucket, each) for bucket in range(buckets))


def map_capacity(bucket: int, rows: int) -> int:
    """Places of a bucket's map for so many rows: one of a series of its own, so that buckets grow one after another."""
    smallest = _SMALLEST * math.pow(_GROWTH, bucket * _GOLDEN % 1)
    steps = max(0, math.ceil(math.log(max(1, rows) / _FULLEST / smallest) / math.log(_GROWTH)))
    return max(math.ceil(smallest * math.pow(_GROWTH, steps)), math.ceil(rows / _FULLEST) + 1)
