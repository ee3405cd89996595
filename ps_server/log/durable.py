"""The log on disk: writes entries in order, reserves room ahead of them, and drops what a snapshot holds."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from asyncio import to_thread
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ps_protocol.errors import InternalError, StorageFull
from ps_protocol.files import sync
from ps_protocol.metrics.histogram import Histogram
from ps_server.log.entries import Entry
from ps_server.log.folder import DataFolder, log_room
from ps_server.log.head import HeadFile, LogHead
from ps_server.log.messages import EntryWriter
from ps_server.log.record import Header, copy_record, encode_record, record_bytes, write_at
from ps_server.log.scan import End
from ps_server.log.segments import FEWEST_SEGMENTS, LogSegment, SegmentFolder, require_space, segment_bytes_for
from ps_server.tasks import seen

PRESSED_SECONDS = 5.0
"""How long a push waits for a snapshot before it is refused, to be tried again."""


_LOOK_SECONDS = 0.01
"""A push that waits for room looks at this interval whether there is some."""


@dataclass(frozen=True, slots=True)
class Saved:
    """How much of a log the newest snapshot made unnecessary."""

    #: The last record that a restart does not replay.
    number: int
    #: ``DurableLog.written_bytes`` when that was the last record; below 0 for one that an earlier process wrote.
    written_bytes: int
    #: When that snapshot began, or this process, on the monotonic clock.
    at: float
    #: ``DurableLog.lost_bytes`` then.
    lost_bytes: int = 0


@dataclass(slots=True)
class _Open:
    """The segment that is written."""

    descriptor: int
    offset: int
    size_bytes: int


class DurableLog:
    """One per shard. ``append`` runs in the executor, ``cut`` and ``prepare`` in a helper thread, the rest on the loop.

    Room for a record is made before its push is accepted: what was accepted can be written, also on a disk that has
    become full. With ``sync`` an entry is on the disk when ``append`` returns; without, it survives the process only.
    """

    def __init__(
        self,
        folder: DataFolder,
        number: int,
        end: End | None,
        *,
        sync: bool,
        writing: bool = True,
        bound_bytes: int | None = None,
    ) -> None:
        """Continue behind record ``number``; at ``end``, when the log has one. Raises OSError.

        ``writing=False``: entries are counted, and written from ``resume`` to ``pause``. ``bound_bytes``: what the
        files of the log may take.
        """
        self.waits = sync
        self._bound_bytes = bound_bytes
        #: Pushes have found no room: a snapshot, which frees space, is due.
        self.pressed = False
        #: Why the last try of one failed; empty: it did not.
        self.snapshot_failure = ""
        #: The last record; being written while ``append`` runs.
        self.number = number
        #: The last record that is written whole.
        self.whole = number
        #: The incarnation that writes now, and the one that wrote the last record; 0: not known.
        self.writer = self.last_writer = 0
        #: Called in the executor after each record, or after several that were written together.
        self.on_append: Callable[[], None] | None = None
        #: A reader still needs the records from this number on; ``cut`` keeps them, up to a limit.
        self.read_from: int | None = None
        #: Bytes written since the process began.
        self.written_bytes = 0
        #: Bytes at the ends of segments for which the next record was too large.
        self.lost_bytes = 0
        #: The part of the log that snapshots contain: all earlier records, until recovery or a snapshot sets it.
        self.saved = Saved(number, 0, time.monotonic())
        #: The time until a record was on disk.
        self.syncs = Histogram()
        self._folder = folder
        self._shard = folder.identity.shard
        self._life = folder.identity.life
        self._path = folder.log
        self._segments = SegmentFolder(folder.log, sync=sync)
        self._writer = EntryWriter()
        self._writing = writing
        self._open: _Open | None = None
        if end is not None and writing:
            self._open = _Open(os.open(end.segment.path, os.O_RDWR), end.offset, end.segment.size_bytes)
        self._head_file = HeadFile(folder.log)
        self._head = LogHead.now(every_push=writing, synced=sync)
        self._begin_head(end.segment if end else None)
        #: Of records that were promised room: how many of each size. Held while that changes, and while files go.
        self._reserved: dict[int, int] = {}
        self._promises = threading.Lock()
        self._largest = 0
        #: Size of the segments made from now on.
        self.segment_bytes = segment_bytes_for(0, bound_bytes)
        self._preparing: asyncio.Task[None] | None = None
        #: Reservations that wait for a segment, where one that a snapshot frees would do.
        self.waiting = 0

    @property
    def unsaved_records(self) -> int:
        """Records that no snapshot holds: a restart replays them."""
        return self.number - self.saved.number

    @property
    def unsaved_bytes(self) -> int:
        """Bytes of these records."""
        return self.written_bytes - self.saved.written_bytes

    @property
    def unsaved_room_bytes(self) -> int:
        """Bytes that these records take in segments, with what was lost at the ends."""
        return self.unsaved_bytes + self.lost_bytes - self.saved.lost_bytes

    @property
    def prepared_bytes(self) -> int:
        """Bytes that can be written before another segment has to be made."""
        opened = self._open
        return sum(self._segments.spare_bytes) + (opened.size_bytes - opened.offset if opened else 0)

    def may_grow(self, most_bytes: int) -> bool:
        """Whether the log takes at most ``most_bytes`` with another segment."""
        try:
            return not self._is_full and self._segments.file_bytes + self.segment_bytes <= most_bytes
        except FileNotFoundError:
            return False  # one was just freed

    def grow(self, most_bytes: int) -> None:
        """Begin to make another segment, if none is being made and the log takes at most ``most_bytes`` with it."""
        if self.may_grow(most_bytes):
            self._prepare_ahead()

    @property
    def _is_full(self) -> bool:
        return self._bound_bytes is not None and self._segments.is_full(self._bound_bytes - self.segment_bytes)

    def check_bound(self, model: str, nbytes: int) -> None:
        """Raises ConfigError when updates of ``nbytes`` bytes need more disk space than the log was given."""
        if self._bound_bytes is None or not self._head.every_push:
            return
        require_space(self._shard, model, nbytes, self._bound_bytes)

    async def space(self, nbytes: int) -> None:
        """Wait while the log has all the space it was given, and a snapshot would make some free.

        Raises StorageFull when none does in time. Pushes that are already accepted keep their room.
        """
        if self._bound_bytes is None or not self._head.every_push:
            return
        size = record_bytes(nbytes)
        until = time.monotonic() + PRESSED_SECONDS
        while self._wanting(size) and self._is_full:
            self.pressed = True
            if time.monotonic() > until:
                raise self._at_limit(self._bound_bytes)
            await asyncio.sleep(_LOOK_SECONDS)

    def _at_limit(self, bound_bytes: int) -> StorageFull:
        failed = self.snapshot_failure
        return StorageFull(
            f"the log of shard {self._shard} has reached its limit, and no snapshot frees space"
            + (f": {failed}" if failed else ""),
            shard=str(self._shard),
            expected=f"{bound_bytes >> 20} MB",
            actual=str(self._path),
            remedy=("see why snapshots fail" if failed else "raise --log-mb")
            + "; pushes are accepted again as soon as there is room",
        )

    async def reserve(self, nbytes: int) -> None:
        """Reserve room for a record with ``nbytes`` bytes of payload. Raises StorageFull; then nothing is reserved."""
        size = record_bytes(nbytes)
        if size > self._largest:
            self._largest, self.segment_bytes = size, segment_bytes_for(size, self._bound_bytes)
        while not self.reserve_now(nbytes):
            making = self._prepare_ahead()
            # A snapshot may free a file sooner than one is filled.
            helps = self._open is not None and size <= self._open.size_bytes
            self.waiting += helps
            try:
                await asyncio.wait([making], timeout=_LOOK_SECONDS)
            finally:
                self.waiting -= helps
            if making.done():
                try:
                    making.result()
                except StorageFull:
                    self.pressed = True
                    raise

    def reserve_now(self, nbytes: int) -> bool:
        """Reserve room for such a record in what is prepared; whether there is so much."""
        size = record_bytes(nbytes)
        if size > self._largest or not self._promise(size):
            return False
        # Not before: a smaller record, which fits, does not wait for the room of a larger one.
        if self._writing and max(self._segments.spare_bytes, default=0) < self.segment_bytes and not self._is_full:
            self._prepare_ahead()
        return True

    def release(self, nbytes: int) -> None:
        """End a reservation, whether or not it was used."""
        size = record_bytes(nbytes)
        with self._promises:
            self._reserved[size] -= 1
            if not self._reserved[size]:
                del self._reserved[size]

    def _promise(self, size: int) -> bool:
        """Reserve ``size`` bytes if they fit into what is prepared; whether they do."""
        with self._promises:
            if self._wanting(size):
                return False
            self._reserved[size] = self._reserved.get(size, 0) + 1
            return True

    @property
    def keeps(self) -> bool:
        """Whether ``append`` writes."""
        return self._writing

    def append(self, entry: Entry) -> int:
        """Write one entry; returns its number. Raises OSError where its room was not reserved."""
        self.append_all((entry,))
        return self.number

    def append_all(self, entries: Sequence[Entry]) -> None:
        """Write entries one behind the other, and wait for the disk once. Raises as ``append``: some may be written."""
        if not self._writing:
            self.number += len(entries)
            return
        together: list[list[memoryview]] = []
        left = 0
        for entry in entries:
            message, payload = self._writer.encode(entry)
            number, behind = self.number + len(together) + 1, len(together)
            record = encode_record(number, self._life, message, payload, self.writer, behind)
            size = sum(map(len, record))
            if together and size > left:  # in the next segment, which is begun when this one is on the disk
                self._write(together, self.writer)
                together = []
            if not together:
                target = self._room_for(size, number)
                left = target.size_bytes - target.offset
            together.append(record)
            left -= size
        if together:
            self._write(together, self.writer)

    def append_copy(self, header: Header, body: memoryview) -> None:
        """Write a record of another log under its own number, the next. Raises OSError as ``append``, InternalError."""
        if header.number != self.number + 1:
            raise InternalError("records came out of order", expected=str(self.number + 1), actual=str(header.number))
        self._write([copy_record(header, self._life, body)], header.writer)

    def _write(self, records: Sequence[list[memoryview]], writer: int) -> None:
        """Write the next records, for which the open segment or another one has room."""
        pieces = records[0] if len(records) == 1 else [piece for record in records for piece in record]
        size, before = sum(map(len, pieces)), self.number
        target = self._room_for(size, before + 1)
        self.number = before + len(records)
        try:
            end = write_at(target.descriptor, pieces, target.offset)
            if self.waits:
                began = time.perf_counter()
                os.fdatasync(target.descriptor)
                self.syncs.observe(time.perf_counter() - began)
        except BaseException:
            # The next record takes the number of the first, and its place.
            self.number = before
            raise
        target.offset = end
        self.written_bytes += size
        self.whole, self.last_writer = self.number, writer
        if self.on_append:
            self.on_append()

    def reset(self, number: int) -> None:
        """In the executor: start over in an emptied folder; the next record is ``number + 1``. Raises OSError."""
        self._close_segment()
        self._segments = SegmentFolder(self._path, sync=self.waits)
        self.number = self.whole = number
        self.saved = Saved(number, self.written_bytes, time.monotonic(), self.lost_bytes)
        self.last_writer = 0
        self._begin_head(None)

    def _begin_head(self, segment: LogSegment | None) -> None:
        """Write the head before any record. Raises OSError."""
        first, size_bytes = (segment.first, segment.size_bytes) if segment else (0, 0)
        self._head = replace(self._head, segment=first, segment_bytes=size_bytes, number=self._certain)
        self._head_file.write(self._head)
        sync(self._path)
        self._folder.holds_log()

    @property
    def _certain(self) -> int:
        """The last record that must be found again; 0 where records are not written all the time."""
        return self.whole if self._head.every_push else 0

    @property
    def path(self) -> Path:
        """Folder of its segments."""
        return self._path

    def resume(self) -> None:
        """In the executor: write from the next entry on, in a segment of its own."""
        self._close_segment()
        self._writing = True

    def pause(self) -> None:
        """In the executor: count entries without writing them."""
        self._close_segment()
        self._writing = False

    def flush(self, after: int) -> None:
        """Write the records behind number ``after`` through to the disk. Raises OSError."""
        if self.waits:
            return
        self.settle()
        for segment in self._segments.live_from(after + 1):
            with segment.path.open("rb") as file:
                os.fdatasync(file.fileno())

    def settle(self) -> None:
        """Have the names of all segments on the disk, and the head, which tells of the newest. Raises OSError."""
        self._head_file.settle()

    def cut(self, through: int, keep_bytes: int) -> None:
        """Drop the records up to ``through``; keep about ``keep_bytes`` of files to be overwritten. Raises OSError."""
        size = self.segment_bytes
        self.pressed = False
        self.settle()  # the head may still name a segment that is dropped
        # Within a bound not all of it, or a reader would block the writer.
        kept_bytes = keep_bytes if self._bound_bytes is None else keep_bytes // 2
        if self.read_from is not None and self._segments.bytes_from(self.read_from) <= kept_bytes:
            through = min(through, self.read_from - 1)
        # All there is room for: another would have to be filled with zeros while the next snapshot is made.
        self._segments.recycle(through + 1, keep := max(FEWEST_SEGMENTS, keep_bytes // size), size)
        with self._promises:
            unneeded = self._segments.take_unneeded(keep, size, self._fits)
        for path in unneeded:
            path.unlink()

    def close(self) -> None:
        """Close the log, after the executor's last work. Repeatable."""
        self._close_segment()
        self._head_file.close()
        if self._head.number != self._certain:
            self._head = replace(self._head, number=self._certain)
            with suppress(OSError):  # the next start then expects less
                self._head_file.write(self._head)

    def _wanting(self, size: int) -> bool:
        """Whether what is reserved, and a record of ``size`` bytes, might not fit into what is prepared."""
        if not self._writing and self._open is None:
            return False
        return not self._fits(self._segments.spare_bytes, size)

    def _fits(self, spares: Collection[int], *more: int) -> bool:
        """Whether ``spares`` and the open segment hold what is reserved, and ``more``."""
        records = [each for each, count in self._reserved.items() for _ in range(count)]
        left = (self._open.size_bytes - self._open.offset) if self._open else 0
        return fits([*records, *more], left, spares)

    async def ready(self) -> None:
        """Have a segment that ``resume`` can begin with. Raises StorageFull."""
        if not self._segments.spare_bytes:
            await asyncio.shield(self._prepare_ahead())

    def _prepare_ahead(self) -> asyncio.Task[None]:
        """Make one more segment; concurrent callers share the task. It raises StorageFull."""
        if self._preparing is None or self._preparing.done():
            self._preparing = asyncio.create_task(to_thread(self._prepare))
            # A caller that needs the room sees the error again.
            seen(self._preparing)
        return self._preparing

    def _prepare(self) -> None:
        with log_room(self._shard, self._path):
            self._segments.prepare(self.segment_bytes)

    def _room_for(self, size: int, number: int) -> _Open:
        """Where ``size`` bytes go, the first of which are those of record ``number``."""
        if self._open is not None and self._open.offset + size <= self._open.size_bytes:
            return self._open
        if self._open is not None:
            self.lost_bytes += self._open.size_bytes - self._open.offset
        self._close_segment()
        descriptor, size_bytes = self._segments.begin(number, size, self.segment_bytes)
        head = replace(self._head, segment=number, segment_bytes=size_bytes, number=self._certain)
        try:
            if self.waits:
                sync(self._path)
                self._head_file.write(head)
            else:
                # A busy disk takes up to a quarter of a second for it, and nothing rests on it before a snapshot does.
                self._head_file.write_later(head)
        except BaseException:
            os.close(descriptor)
            raise
        self._head = head
        self._open = _Open(descriptor, 0, size_bytes)
        return self._open

    def _close_segment(self) -> None:
        if self._open is not None:
            os.close(self._open.descriptor)
            self._open = None


def fits(records: Collection[int], left: int, spares: Collection[int]) -> bool:
    """Whether ``records`` of these sizes can be written in any order, without another segment.

    Each goes behind the one before: into the ``left`` bytes of the open segment, else to the beginning of any of
    ``spares`` that holds it; what it leaves behind in the segment before is lost.
    """
    total = sum(records)
    if total <= left:
        return True
    largest, least = max(records), min(records)
    # A record that did not fit would have found all segments that hold the largest one used. A segment is left when a
    # record does not fit behind the others: it holds more than its size without the largest. One that was begun holds a
    # record.
    used = max(0, left - largest + 1) + sum(max(spare - largest + 1, least) for spare in spares if spare >= largest)
    return used + least > total and any(spare >= largest for spare in spares)
