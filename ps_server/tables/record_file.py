"""The rows of one table that are not in memory: fixed-width records in one file, each under a checksum.

A record is a checksum (64 bits), the row's id, its values and its optimizer state. Records are only appended: to one
*segment*, a run of records, until that is full. A record that its row does not need any more is dead; a segment of dead
records only is written again, and where too many records are dead, the segment with the fewest living ones is emptied
into others (Rosenblum and Ousterhout 1992, "The Design and Implementation of a Log-Structured File System", section 3).

The file belongs to one process, and has no name: nothing of it outlives the process, which reads its rows from
snapshot and log again. The page cache of the system reads and writes it in the background.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, types

from ps_protocol.errors import DamagedData
from ps_protocol.files import FILE_MODE
from ps_protocol.model.kernels import kernel
from ps_protocol.model.tables import Ids
from ps_server.tables.memory import FLOATS, IDS

Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

MOST_RECORDS = (1 << 31) - 1
"""Their numbers fit 31 bits."""

_BUFFER_BYTES = 256 << 10
_PAGE_BYTES = 4096
#: Of all records in the file, how many may be dead before segments are emptied: half.
_DEAD_PART = 2
_FEWEST_SEGMENTS = 4
#: Where the first of many rows take more seconds each, reads wait for a device: the others are announced first.
_SAMPLED_ROWS = 16
_SLOW_SECONDS = 15e-6

_U64_2 = types.uint64[:, ::1]
_F32_2 = types.float32[:, ::1]
_I32 = types.int32[::1]
_pread: Any = types.ExternalFunction("pread", types.int64(types.int32, types.uintp, types.uintp, types.int64))
_advise: Any = types.ExternalFunction("posix_fadvise", types.int32(types.int32, types.int64, types.int64, types.int32))
_WILL_NEED = 3
_PRIME = np.uint64(0x9E3779B185EBCA87)


@njit(inline="always")
def _checksum(words: Any, at: Any, record: Any, generation: Any) -> Any:
    """Of record ``at`` of ``words`` without its first word. Each step is one-to-one in what it mixes and in what it
    mixes it into: no change of one word goes unseen, nor a record of another place or of an earlier use of its segment.
    """
    found = (np.uint64(record) << np.uint64(32) | np.uint64(generation)) * _PRIME
    for i in range(1, words.shape[1]):
        found ^= words[at, i]
        found = ((found << np.uint64(29)) | (found >> np.uint64(35))) * _PRIME
    return found ^ (found >> np.uint64(32))


@kernel(types.void(IDS, IDS, FLOATS, types.int64, types.int64, _U64_2, _F32_2))
def _pack(ids: Any, rows: Any, values: Any, first: Any, generation: Any, words: Any, floats: Any) -> None:
    """The records ``first``, … of ``ids``, whose values are these ``rows`` of ``values``, into the buffer."""
    for i in range(ids.size):
        words[i, words.shape[1] - 1] = 0
        words[i, 1] = np.uint64(ids[i])
        for column in range(values.shape[1]):
            floats[i, 4 + column] = values[rows[i], column]
        words[i, 0] = _checksum(words, i, first + i, generation)


@kernel(
    types.int64(
        types.int32, IDS, IDS, types.int64, _I32, IDS, types.int64, types.boolean, types.int64, _U64_2, _F32_2, IDS,
        FLOATS,
    )
)  # fmt: skip
def _read(
    descriptor: Any,
    records: Any,
    order: Any,
    per_segment: Any,
    generations: Any,
    ids: Any,
    gap: Any,
    announce_all: Any,
    buffer: Any,
    words: Any,
    floats: Any,
    places: Any,
    out: Any,
) -> Any:
    """Values of ``records``, rising, of the ids ``ids[order]``, to ``places[order]`` of ``out``: as many columns.

    Neighbours with at most ``gap`` records between them are read together, into ``words``, which lies at ``buffer``.
    ``announce_all``: ask for all of them first, so that the device reads several at a time. Returns -1, or the place in
    ``records`` of one that is not there or not what was written.
    """
    size = words.shape[1] * 8
    for announce in (True, False):
        if announce and not announce_all:
            continue
        begin = 0
        while begin < records.size:
            first, end = records[begin], begin + 1
            while (
                end < records.size
                and records[end] - records[end - 1] <= gap
                and records[end] - first < words.shape[0]
                and records[end] // per_segment == first // per_segment
            ):
                end += 1
            count = (records[end - 1] - first + 1) * size
            if announce:
                _advise(descriptor, first * size, count, _WILL_NEED)
                begin = end
                continue
            if _pread(descriptor, buffer, count, first * size) != count:
                return begin
            generation = generations[first // per_segment]
            for i in range(begin, end):
                at = records[i] - first
                if words[at, 0] != _checksum(words, at, records[i], generation):
                    return i
                if words[at, 1] != np.uint64(ids[order[i]]):
                    return i
                for column in range(out.shape[1]):
                    out[places[order[i]], column] = floats[at, 4 + column]
            begin = end
    return np.int64(-1)


def _nameless(folder: Path) -> int:
    """A descriptor of a new file in ``folder`` that goes with the process. Raises OSError."""
    try:
        return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
    path = folder / f"rows-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    path.unlink()
    return descriptor


def record_bytes(width: int) -> int:
    """Bytes of a record: checksum, id, and values and state in whole words."""
    return 8 * (2 + (width + 1) // 2)


def most_records(living: int, lot: int) -> int:
    """Records of a file with so many living ones, at most, where ``lot`` more are written before it is cleaned; but for
    a few segments, and while it is not pinned.
    """
    return living * _DEAD_PART // (_DEAD_PART - 1) + lot


class RecordFile:
    """Owned by one table's PagedRows, used by the executor; while it is pinned, any thread may ``read``."""

    def __init__(self, folder: Path, width: int, damaged: Callable[[str], DamagedData], segment_bytes: int) -> None:
        """``width``: float32 numbers of a row. ``damaged`` makes the error for what cannot be read back.

        Raises OSError.
        """
        self._damaged = damaged
        self._width = width
        self.record_bytes = record_bytes(width)
        self._words = self.record_bytes // 8
        self.per_segment = max(1, segment_bytes // self.record_bytes)
        self.descriptor = _nameless(folder)
        self._opened = os.fstat(self.descriptor)
        # Rows of one batch lie anywhere: what the system would read ahead is of other rows.
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        #: By segment: its living records, and how often it has been filled.
        self.living = np.zeros(0, np.int32)
        self._generations = np.zeros(0, np.int32)
        self._free: list[int] = []
        #: The segment that is being filled, and its records so far.
        self._head, self._filled = -1, 0
        self._lock = threading.Lock()
        self._pins = 0
        #: Rows of all segments that are alive.
        self.rows = 0
        self.read_bytes = self.written_bytes = 0

    def close(self) -> None:
        """No more is read or written."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        if getattr(self, "descriptor", -1) >= 0:
            # Nobody says when an object goes. Where the number was closed by then, it may be that of another file.
            with suppress(OSError):
                if os.path.samestat(os.fstat(self.descriptor), self._opened):
                    os.close(self.descriptor)

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return self.living.size * self.per_segment * self.record_bytes

    def append(self, ids: Ids, rows: Numbers, values: Floats) -> Numbers:
        """Write records of ``ids``, whose values are these ``rows`` of ``values``; returns their numbers.

        Raises OSError, with nothing written that counts.
        """
        records = np.empty(ids.size, np.int64)
        done = 0
        try:
            while done < ids.size:
                if self._head < 0 or self._filled == self.per_segment:
                    self._begin_segment()
                most = max(1, _BUFFER_BYTES // self.record_bytes)
                count = min(ids.size - done, self.per_segment - self._filled, most)
                first = self._head * self.per_segment + self._filled
                words = np.empty((count, self._words), np.uint64)
                piece = slice(done, done + count)
                _pack(
                    ids[piece], rows[piece], values, first, self._generations[self._head], words, words.view(np.float32)
                )
                self._write(words, first)
                records[piece] = np.arange(first, first + count)
                self.living[self._head] += count
                self.rows += count
                self._filled += count
                done += count
        except OSError:
            self.free(records[:done])
            raise
        return records

    def _write(self, words: npt.NDArray[np.uint64], first: int) -> None:
        data, at = words.reshape(-1).view(np.uint8).data, first * self.record_bytes
        while len(data):
            written = os.pwrite(self.descriptor, data, at)
            data, at = data[written:], at + written
            self.written_bytes += written

    def free(self, records: Numbers) -> None:
        """These records are dead; a reader that pinned the file may still read them."""
        self.living -= np.bincount(records // self.per_segment, minlength=self.living.size).astype(np.int32)
        self.rows -= records.size

    def read(self, records: Numbers, ids: Ids, places: Numbers, out: Floats) -> None:
        """Values of the ``records`` of ``ids`` to ``places`` of ``out``, float32 [any, width or fewer].

        Raises DamagedData for one that is not what was written.
        """
        if not records.size:
            return
        order = np.argsort(records)
        rising = records[order]
        few = _SAMPLED_ROWS if records.size > 4 * _SAMPLED_ROWS else records.size
        began = time.perf_counter()
        bad = self._read(rising[:few], ids, order[:few], places, out, announce=False)
        if bad < 0 and few < records.size:
            announce = time.perf_counter() - began > few * _SLOW_SECONDS
            bad = self._read(rising[few:], ids, order[few:], places, out, announce=announce)
            bad += few if bad >= 0 else 0
        self.read_bytes += records.size * self.record_bytes
        if bad >= 0:
            raise self._damaged(self._why(int(rising[bad]), int(ids[order[bad]])))

    def _read(self, rising: Numbers, ids: Ids, order: Numbers, places: Numbers, out: Floats, *, announce: bool) -> int:
        """The first of ``rising`` records that is not what was written; -1: none."""
        words = np.empty((max(1, _BUFFER_BYTES // self.record_bytes), self._words), np.uint64)
        return int(
            _read(
                self.descriptor,
                rising,
                order,
                self.per_segment,
                self._generations,
                ids,
                max(1, _PAGE_BYTES // self.record_bytes),
                announce,
                words.ctypes.data,
                words,
                words.view(np.float32),
                places,
                out,
            )
        )

    def _why(self, record: int, id_: int) -> str:
        at = record * self.record_bytes
        try:
            found = os.pread(self.descriptor, self.record_bytes, at)
        except OSError as error:
            return f"the row of id {id_}, at byte {at}, cannot be read: {error.strerror}"
        if len(found) < self.record_bytes:
            return f"the row of id {id_}, at byte {at}, is missing: the file was cut"
        return f"the row of id {id_}, at byte {at}, is not what was written"

    def pin(self) -> None:
        """Until ``unpin``, all records that are alive now stay where they are."""
        with self._lock:
            self._pins += 1

    def unpin(self) -> None:
        """Ends a ``pin``. From any thread."""
        with self._lock:
            self._pins -= 1

    def emptiest(self) -> tuple[int, Ids] | None:
        """A segment to empty before more is written: its first record, and the ids of all of its records, living and
        dead; None: no segment. The living ones are to be appended again. Raises DamagedData.
        """
        if not self._has_too_many_dead:
            return None
        self._collect()
        if self._pins or not self._has_too_many_dead:
            return None
        living = self.living.copy()
        living[[*self._free, self._head]] = self.per_segment + 1
        first = int(np.argmin(living)) * self.per_segment
        words = np.empty((self.per_segment, self._words), np.uint64)
        data, at = words.reshape(-1).view(np.uint8).data, first * self.record_bytes
        try:
            found = os.preadv(self.descriptor, [data], at)
        except OSError as error:
            raise self._damaged(f"the rows at byte {at} cannot be read: {error.strerror}") from error
        self.read_bytes += found
        if found < len(data):
            raise self._damaged(f"the rows at byte {at} are missing: the file was cut")
        return first, words[:, 1].view(np.int64).copy()

    @property
    def _has_too_many_dead(self) -> bool:
        """Of the records in segments that are not free."""
        used = self.living.size - len(self._free)
        records = used * self.per_segment
        return used >= _FEWEST_SEGMENTS and (records - self.rows) * _DEAD_PART >= records

    def check_emptied(self, first: int) -> None:
        """Raise DamagedData if the segment that begins with record ``first`` has living records whose ids were not
        found in it: it would be emptied again and again.
        """
        if left := int(self.living[first // self.per_segment]):
            at = first * self.record_bytes
            raise self._damaged(f"{left} of the rows from byte {at} on are not what was written")

    def _collect(self) -> None:
        """Segments without a living record are free, unless somebody may read them."""
        with self._lock:
            if self._pins:
                return
        taken = np.zeros(self.living.size, np.bool_)
        taken[self._free] = True
        if self._head >= 0:
            taken[self._head] = True
        self._free += np.flatnonzero(~taken & (self.living == 0)).tolist()

    def _begin_segment(self) -> None:
        if not self._free:
            self._collect()
        if self._free:
            self._head = self._free.pop()
            self._generations[self._head] += 1
        else:
            number = self.living.size
            if (number + 1) * self.per_segment > MOST_RECORDS:
                raise OSError(f"a file of rows holds at most {MOST_RECORDS} records")
            size = self.per_segment * self.record_bytes
            os.posix_fallocate(self.descriptor, number * size, size)
            self.living = np.append(self.living, np.int32(0))
            self._generations = np.append(self._generations, np.int32(0))
            self._head = number
        self._filled = 0
