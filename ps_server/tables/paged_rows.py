"""Which rows of a table are in memory: those used lately, where a limit is set; the others are records of a RecordFile.

A row that is needed comes to memory, and others make room: the second chance algorithm (Corbató 1968, "A Paging
Experiment with the Multics System") with a count of uses up to three instead of one bit (Smith 1978, "Sequentiality and
Prefetching in Database Systems", generalized clock). Rows leave in lots, sorted by bucket, so that what a snapshot or a
move reads together lies together. Where the disk takes no more, rows stay in memory above the limit, and a message says
so.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from numba import types

from ps_protocol.errors import DamagedData, TableFull
from ps_protocol.logs import EventLogger
from ps_protocol.model.ids import buckets_of
from ps_protocol.model.kernels import kernel
from ps_protocol.model.tables import Ids
from ps_server.tables.arrays import Reserved, machine_bytes
from ps_server.tables.memory import FLOATS, IDS, prefetch
from ps_server.tables.record_file import Floats, Numbers, RecordFile
from ps_server.tables.row_memory import FEWEST_ROWS, RowMemory

logger = EventLogger(__name__)

_MOST_EVICTED = 1 << 14
_MANY_ROWS = 1 << 10
"""A table with fewer is quick from the disk, too."""
#: Of the rows in memory, which part makes room together.
_LOT_PART = 16
_SLOT_BYTES = 4 + 4 + 1
_AHEAD = 32
_FREE = np.uint8(255)
_HELD = np.uint8(64)
_MOST_USES = np.uint8(3)
#: The first push does not count: most rows that come are used once.
_NEW = np.uint8(32)

_I32 = types.int32[::1]
_I64 = types.int64[::1]
_TWO: Any = types.UniTuple(types.int64, 2)  # type: ignore[no-untyped-call]
_U8 = types.uint8[::1]


@kernel(_TWO(IDS, _I32, _U8, _I32, types.boolean, _I64, _I64, _I64))
def _slots(rows: Any, place: Any, uses: Any, home: Any, write: Any, slots: Any, missing: Any, freed: Any) -> Any:
    """The slot of each row into ``slots``, -1 where it has none; those numbers with a row on disk into ``missing``.

    ``write``: the rows in memory are used, and what the file has of them is ``freed``. Returns how many of both.
    """
    absent = stale = 0
    for i in range(rows.size):
        if i + _AHEAD < rows.size and rows[i + _AHEAD] >= 0:
            prefetch(place, rows[i + _AHEAD])
        slot = np.int64(-1)
        if rows[i] >= 0:
            slot = np.int64(place[rows[i]])
            if slot < 0:
                missing[absent] = i
                absent += 1
                slot = np.int64(-1)
            elif write:
                uses[slot] = min(uses[slot] + 1, _MOST_USES) if uses[slot] != _NEW else 0
                if home[slot] >= 0:
                    freed[stale] = home[slot]
                    stale += 1
                    home[slot] = -1
        slots[i] = slot
    return absent, stale


@kernel(_TWO(_U8, types.int64, types.int64, _I64))
def _clock(uses: Any, used: Any, hand: Any, victims: Any) -> Any:
    """Slots that make room, of [0, ``used``), into ``victims``, free from now on; from ``hand`` on, where the next
    search begins. Returns how many, and that.
    """
    found = 0
    for _ in range((_MOST_USES + 2) * used):
        if found == victims.size:
            break
        if hand >= used:
            hand = 0
        if uses[hand] == 0 or uses[hand] == _NEW:
            uses[hand] = _FREE
            victims[found] = hand
            found += 1
        elif uses[hand] < _HELD:
            uses[hand] -= 1
        hand += 1
    return found, hand


@kernel(types.void(FLOATS, IDS, FLOATS))
def _gather(values: Any, slots: Any, out: Any) -> None:
    """As many columns of ``slots`` as ``out`` has; what is not in memory stays as it is."""
    width = values.shape[1]
    for i in range(slots.size):
        if i + _AHEAD < slots.size and slots[i + _AHEAD] >= 0:
            prefetch(values, slots[i + _AHEAD] * width)
            prefetch(values, slots[i + _AHEAD] * width + out.shape[1] - 1)
        if slots[i] >= 0:
            for column in range(out.shape[1]):
                out[i, column] = values[slots[i], column]


def slot_bytes(width: int) -> int:
    """Bytes of a row in memory, beside what is there of all rows."""
    return _SLOT_BYTES + 4 * width


def lot_rows(most: int) -> int:
    """Rows that leave together where ``most`` may be in memory."""
    return max(1, min(_MOST_EVICTED, most // _LOT_PART))


class RowIndex(Protocol):
    """The ids of a table, in memory in any case."""

    @property
    def index_bytes(self) -> int:
        """Bytes of ids and maps."""

    def find(self, ids: Ids) -> Numbers:
        """The row of each id, -1 where it has none."""


class KeptRows:
    """Copies of rows in memory, and the places of the others in a file that keeps them as they are meanwhile."""

    def __init__(self, values: Floats, file: RecordFile | None, ids: Ids, places: Numbers) -> None:
        """``values``: all that are in memory. ``places``: as those of PagedRows; ``file`` may be missing if none is
        there.
        """
        self._file, self._ids, self._places = file, ids, places
        near = places >= 0
        self._values = values[places[near]]
        places[near] = np.arange(len(self._values))
        if file is not None:
            file.pin()
            weakref.finalize(self, file.unpin)

    def read(self, numbers: Numbers) -> Floats:
        """Values and state of the ``numbers``-th of them. From any thread. Raises DamagedData."""
        places = self._places[numbers]
        out = np.empty((numbers.size, self._values.shape[1]), np.float32)
        _gather(self._values, places, out)
        far = np.flatnonzero(places < 0)
        if self._file is not None:
            self._file.read(-1 - places[far], self._ids[numbers[far]], far, out)
        return out


class PagedRows:
    """Values and state of the rows of one RowStore, which owns it: each in a slot of memory or in a record on disk.

    Called by the executor; a KeptRows may be read in any thread.
    """

    def __init__(
        self,
        memory: RowMemory,
        table: str,
        ids: Ids,
        place: npt.NDArray[np.int32],
        buckets: int,
        width: int,
        store: RowIndex,
    ) -> None:
        """``ids`` and ``place`` are columns of the store; of each row, the latter is its slot, or -1 - its record."""
        self._memory = memory
        self._table = table
        self._ids = ids
        self._buckets = buckets
        self._width = width
        self._store: RowIndex = weakref.proxy(store)
        self.slot_bytes = slot_bytes(width)
        slots = max(FEWEST_ROWS, min(ids.size, machine_bytes() // self.slot_bytes))
        self._reserved = [
            Reserved(slots, width, np.float32),
            Reserved(slots, 1, np.int32),
            Reserved(slots, 1, np.int32),
            Reserved(slots, 1, np.uint8),
            Reserved(slots, 1, np.int32),
        ]
        #: float32 [slots, width]
        self.values: Floats = self._reserved[0].array
        #: Of each slot: the row that is in it; the record with its very values, -1: there is none; its uses.
        self._owner, self._home, self._uses, self._free = (column.array.reshape(-1) for column in self._reserved[1:])
        self.place = place
        #: Slots below this number have been used; so many of them are free, in ``_free``.
        self._used = self._free_count = 0
        self._hand = 0
        self.count = 0
        #: Of this table alone, ids and maps with it; 0: that of all.
        self.limit_bytes = 0
        self._file: RecordFile | None = None
        #: Rows that were looked for in memory, and those of them that were on disk.
        self.wanted = self.missed = 0
        #: Why the last rows could not be written; empty: they could.
        self.trouble = ""
        self._is_crowded = False
        memory.add(self)

    @property
    def index_bytes(self) -> int:
        """Bytes of the ids and maps of the store."""
        return self._store.index_bytes

    @property
    def in_memory(self) -> int:
        """Rows in memory."""
        return self._used - self._free_count

    @property
    def size_bytes(self) -> int:
        """Bytes of memory."""
        return self._used * self.slot_bytes

    @property
    def on_disk(self) -> int:
        """Rows that are not in memory. From any thread: new rows that have a slot and do not count yet are none."""
        return max(0, self.count - self.in_memory)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the file."""
        return self._file.size_bytes if self._file else 0

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes read from the file, and written."""
        return (self._file.read_bytes, self._file.written_bytes) if self._file else (0, 0)

    @property
    def wanted_bytes(self) -> int:
        """What all rows would take in memory, or may."""
        wanted = self.count * self.slot_bytes
        return min(wanted, max(0, self.limit_bytes - self.index_bytes)) if self.limit_bytes else wanted

    @property
    def lot_rows(self) -> int:
        """Rows that are written or brought together, where there are many."""
        return lot_rows(self._memory.most_rows(self))

    def slots(self, rows: Numbers, *, write: bool) -> Numbers:
        """The slot of each of ``rows``, each once, all in memory until the next call; -1 for -1.

        ``write``: their values are about to change. Raises DamagedData, TableFull.
        """
        self._shrink()
        slots, missing, freed = (np.empty(rows.size, np.int64) for _ in range(3))
        absent, stale = _slots(rows, self.place, self._uses, self._home, write, slots, missing, freed)
        if stale:
            self._rows_file.free(freed[:stale])
        self.wanted += rows.size
        if absent:
            self.missed += absent
            self._bring(rows, slots, missing[:absent], write=write)
        return slots

    def _bring(self, rows: Numbers, slots: Numbers, missing: Numbers, *, write: bool) -> None:
        here = slots[slots >= 0]
        self._uses[here] |= _HELD
        # In the order of the file: then memory is written in its order, too.
        missing = missing[np.argsort(self.place[rows[missing]])[::-1]]
        coming = rows[missing]
        try:
            taken = self._take(missing.size)
        finally:
            self._uses[here] &= ~_HELD
        # Only now: they may have got other records, from a segment that was emptied.
        records = -1 - self.place[coming].astype(np.int64)
        try:
            self._rows_file.read(records, self._ids[coming], taken, self.values)
        except BaseException:
            self._give(taken)
            raise
        self._owner[taken] = coming
        self.place[coming] = taken
        self._uses[taken] = 0 if write else _NEW
        self._home[taken] = -1 if write else records
        if write:
            self._rows_file.free(records)
        slots[missing] = taken

    def read(self, rows: Numbers, out: Floats) -> None:
        """Copy values to ``out``, float32 [n, width or fewer]; what is -1 stays as it is. Nothing comes to memory.

        Raises DamagedData.
        """
        places = np.where(rows >= 0, self.place[np.maximum(rows, 0)], 0).astype(np.int64)
        far = np.flatnonzero((places < 0) & (rows >= 0))
        places[rows < 0] = -1
        _gather(self.values, places, out)
        if far.size:
            self._rows_file.read(-1 - places[far], self._ids[rows[far]], far, out)

    def look_up(self, rows: Numbers, out: Floats) -> None:
        """As ``read``; rows that were on disk come to memory, as far as they fit: a push of them is expected."""
        for piece in self.pieces(rows.size):
            _gather(self.values, self.slots(rows[piece], write=False), out[piece])

    def pieces(self, count: int) -> Iterator[slice]:
        """``count`` rows in pieces that fit in memory together."""
        most = max(FEWEST_ROWS, self._memory.most_rows(self) // 2)
        return (slice(begin, min(begin + most, count)) for begin in range(0, count, most))

    def add(self, first: int, count: int) -> None:
        """Rows [``first``, ``first + count``) are new: each has a slot, for values that are written next."""
        self._shrink()
        taken = self._take(count)
        self._owner[taken] = np.arange(first, first + count)
        self.place[first : first + count] = taken
        self._uses[taken] = _NEW
        self._home[taken] = -1
        self.count = first + count

    def write(self, first: int, rows: Floats) -> None:
        """Rows from ``first`` on are new, with these values: in memory while there is room, else on disk at once."""
        self._shrink()
        room = min(len(rows), max(0, self._memory.most_rows(self) - self.in_memory))
        if room:
            self.add(first, room)
            self.values[self.place[first : first + room]] = rows[:room]
        if room == len(rows):
            return
        self._clean()
        try:
            found = self._rows_file.append(
                self._ids[first + room : first + len(rows)], np.arange(room, len(rows)), rows
            )
        except OSError as error:
            self._full(error)
            self.add(first + room, len(rows) - room)
            self.values[self.place[first + room : first + len(rows)]] = rows[room:]
            return
        self._fine()
        self.place[first + room : first + len(rows)] = -1 - found
        self.count = first + len(rows)

    def leave(self, rows: Numbers) -> None:
        """These rows are about to be removed: what they have is free."""
        places = self.place[rows].astype(np.int64)
        slots = places[places >= 0]
        homes = self._home[slots].astype(np.int64)
        records = np.concatenate((-1 - places[places < 0], homes[homes >= 0]))
        if records.size:
            self._rows_file.free(records)
        self._give(slots)

    def moved(self, rows: Numbers, count: int) -> None:
        """The last rows have taken the place of ``rows``, as far as these are below ``count``, which are left."""
        self.count = count
        rows = rows[rows < count]
        slots = self.place[rows]
        self._owner[slots[slots >= 0]] = rows[slots >= 0]

    def keep(self, rows: Numbers) -> KeptRows:
        """These rows as they are now, to be read later, in any thread, until it is not referenced."""
        return KeptRows(self.values, self._file, self._ids[rows], self.place[rows].astype(np.int64))

    # -- slots

    def _shrink(self) -> None:
        """Give memory back that is above the limit, as far as the disk takes rows. No slot is held."""
        most = self._memory.most_rows(self)
        self._say_crowded(most)
        if self._used <= most + self.lot_rows:
            return
        slots = np.arange(most, self._used)
        self._write_out(slots[self._uses[slots] != _FREE])
        if (self._uses[slots] != _FREE).any():
            return
        free = self._free[: self._free_count]
        free = free[free < most]
        self._free_count = free.size
        self._free[: free.size] = free
        for column in self._reserved[:4]:
            column.give_back(most, self._used)
        self._used = most
        self._clean()

    def _say_crowded(self, most: int) -> None:
        """Log where ids and maps leave hardly any memory, so that everything waits for the disk; again only after they
        have left enough for many rows.
        """
        is_crowded = most <= FEWEST_ROWS
        if is_crowded and not self._is_crowded and self.count > _MANY_ROWS:
            self._is_crowded = True
            logger.warning(
                "table.disk",
                "shard %d, table '%s': ids and maps take all of the memory that tables may take, %.1f MB of them this "
                "one's: hardly a row stays in memory, and each look-up waits for the disk; give tables more memory, "
                "use more shards, or let rows expire",
                self._memory.shard,
                self._table,
                self.index_bytes / 1e6,
            )
        self._is_crowded &= most <= _MANY_ROWS

    def _take(self, count: int) -> Numbers:
        """So many free slots; rows in others leave for that, but for those that are held. Raises TableFull."""
        if self._free_count < count:
            growth = max(0, self._memory.most_rows(self) - self._used)
            if (short := count - self._free_count - growth) > 0:
                self._evict(max(short, self.lot_rows))
        reused = min(count, self._free_count)
        new = count - reused
        if self._used + new > self._owner.size:
            raise TableFull(
                "rows of a table do not fit into the memory of this machine, and the disk takes none of them",
                variable=self._table,
                shard=str(self._memory.shard),
                expected=f"at most {self._owner.size} rows of {self.slot_bytes} bytes",
                actual=self.trouble or f"{self._used + new} rows at one time",
                remedy=f"make room in {self._memory.folder}",
            )
        self._free_count -= reused
        taken = np.empty(count, np.int64)
        taken[:reused] = self._free[self._free_count : self._free_count + reused]
        taken[reused:] = np.arange(self._used, self._used + new)
        self._used += new
        return taken

    def _give(self, slots: Numbers) -> None:
        self._uses[slots] = _FREE
        self._free[self._free_count : self._free_count + slots.size] = slots
        self._free_count += slots.size

    def _evict(self, count: int) -> None:
        victims = np.empty(min(count, self._used), np.int64)
        found, self._hand = _clock(self._uses, self._used, self._hand, victims)
        victims = victims[:found]
        self._uses[victims] = 0
        self._write_out(victims)
        self._clean()

    def _write_out(self, slots: Numbers) -> None:
        """The rows in these slots leave for the disk; where it takes none, those stay that it does not have."""
        homes = self._home[slots].astype(np.int64)
        clean = slots[homes >= 0]
        self.place[self._owner[clean]] = -1 - self._home[clean]
        self._give(clean)
        changed = slots[homes < 0]
        if not changed.size:
            return
        owners = self._owner[changed].astype(np.int64)
        order = np.argsort(buckets_of(self._ids[owners], self._buckets), kind="stable")
        changed, owners = changed[order], owners[order]
        try:
            records = self._rows_file.append(self._ids[owners], changed, self.values)
        except OSError as error:
            self._full(error)
            return
        self._fine()
        self.place[owners] = -1 - records
        self._give(changed)

    def _clean(self) -> None:
        """While too many records are dead, write the living ones of the emptiest segment again, so that it is free."""
        if self._file is None:
            return
        while (found := self._file.emptiest()) is not None:
            first, ids = found
            rows = self._store.find(ids)
            rows[rows >= self.count] = -1  # New, and without a place yet.
            records = np.arange(first, first + ids.size)
            places = self.place[np.maximum(rows, 0)].astype(np.int64)
            in_memory = (rows >= 0) & (places >= 0)
            slots = places[in_memory]
            slots = slots[self._home[slots] == records[in_memory]]
            on_disk = (rows >= 0) & (places == -1 - records)
            rows, records = rows[on_disk], records[on_disk]
            # What is in memory as well is not written again: it will be when its row leaves.
            self._file.free(self._home[slots].astype(np.int64))
            self._home[slots] = -1
            values = np.empty((rows.size, self._width), np.float32)
            self._file.read(records, self._ids[rows], np.arange(rows.size), values)
            try:
                written = self._file.append(self._ids[rows], np.arange(rows.size), values)
            except OSError as error:
                self._full(error)
                return
            self._file.free(records)
            self.place[rows] = -1 - written
            self._file.check_emptied(first)

    # -- the file

    @property
    def _rows_file(self) -> RecordFile:
        if self._file is None:
            memory = self._memory
            damaged = partial(_damaged, self._table, memory)
            self._file = RecordFile(memory.folder, self._width, damaged, memory.segment_bytes)
        return self._file

    def _full(self, error: OSError) -> None:
        if not self.trouble:
            logger.error(
                "table.disk",
                "shard %d, table '%s': rows stay in memory above --table-memory, for %s takes none: %s",
                self._memory.shard,
                self._table,
                self._memory.folder,
                error,
            )
        self.trouble = str(error)

    def _fine(self) -> None:
        if self.trouble:
            logger.info(
                "table.disk",
                "shard %d, table '%s': %s takes rows again",
                self._memory.shard,
                self._table,
                self._memory.folder,
            )
        self.trouble = ""


def _damaged(table: str, memory: RowMemory, what: str) -> DamagedData:
    error = DamagedData(
        f"the file of rows of table '{table}' in {memory.folder} is damaged: {what}",
        variable=table,
        shard=str(memory.shard),
        remedy="check the disk; a shard with a data directory reads its rows again from snapshot and log, else start "
        "the job again from a checkpoint",
    )
    memory.on_damage(error)
    return error
