"""Owns what one shard's data directory would hold: segments that can end torn, one snapshot, and who wrote it last."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, field
from pathlib import Path

from ps_server.consistency import TrackerMemento
from ps_server.log import Entry
from ps_server.log.messages import EntryWriter
from ps_server.log.record import HEADER_BYTES, encode_record, padded
from ps_server.log.scan import End, Scan
from ps_server.log.segments import Segment
from simulation.scheduler import Violation

SEGMENT_BYTES = 4 << 10
"""Small, so that a run has many; a round of many pushes gets a larger one."""

PUSH_BYTES = 512
"""More than a push takes in a record of its own, with header and payload."""


@dataclass(slots=True)
class MemorySegment:
    """A live segment file: ``first`` is the number of its first record. What lay in it before is still there."""

    first: int
    data: bytearray


@dataclass(slots=True)
class SavedSnapshot:
    """A committed snapshot. Its parts are of different ages, as a real one's are."""

    #: Records after this one are needed.
    number: int
    through: int
    log_goes_on: bool
    initialised: bool
    tracker: TrackerMemento
    tracker_number: int
    #: Per part of the values: the last record in it, and the value.
    parts: list[tuple[int, int]]


@dataclass(slots=True)
class Disk:
    """Outlives the processes that write it; one at a time holds it."""

    incarnation: int = 0
    life: int = 0
    segments: list[MemorySegment] = field(default_factory=list)
    spares: list[bytearray] = field(default_factory=list)
    snapshot: SavedSnapshot | None = None
    #: No room for new files.
    full: bool = False
    held: bool = False

    def copied(self) -> Disk:
        """As a backup would hold it."""
        other = copy.deepcopy(self)
        other.held = False
        return other


class DiskLog:
    """The log of one life of a shard on its disk: the rules of DurableLog without its threads."""

    def __init__(self, disk: Disk, number: int, end: tuple[int, int] | None, *, writing: bool) -> None:
        """Go on behind record ``number``; ``end``: where, as (first record of the last segment, offset)."""
        self.number = number
        self._disk = disk
        self._life = disk.life
        self._writer = EntryWriter()
        self.writing = writing
        self._open: MemorySegment | None = None
        self._offset = 0
        #: Pushes that room was promised to.
        self.reserved = 0
        if end is not None and writing:
            self._open = next(segment for segment in disk.segments if segment.first == end[0])
            self._offset = end[1]

    def reserve(self, pushes: int = 1) -> bool:
        """Have room for that many pushes more; False when the disk is full."""
        needed = padded(HEADER_BYTES + PUSH_BYTES * (self.reserved + pushes))
        if self.writing or self._open:
            left = len(self._open.data) - self._offset if self._open else 0
            if needed > left and all(needed > len(spare) for spare in self._disk.spares) and not self._prepare(needed):
                return False
        self.reserved += pushes
        return True

    def append(self, entry: Entry, torn: float | None = None) -> int:
        """Write one record; with ``torn`` only that part of it, as a process does that dies meanwhile."""
        self.number += 1
        if not self.writing:
            return self.number
        message, payload = self._writer.encode(entry)
        data = b"".join(encode_record(self.number, self._life, message, payload))
        segment = self._room_for(len(data))
        # A record that lacks only zeros at its end is whole: it is torn before them.
        written = data if torn is None else data[: int((HEADER_BYTES + len(message)) * torn)]
        segment.data[self._offset : self._offset + len(written)] = written
        self._offset += len(data)
        return self.number

    def resume(self) -> bool:
        """Write from the next record on, in a segment of its own; False when there is no room."""
        if not self._disk.spares and not self._prepare(SEGMENT_BYTES):
            return False
        self._open, self.writing = None, True
        return True

    def pause(self) -> None:
        """Count records without writing them."""
        self._open, self.writing = None, False

    def cut(self, through: int) -> None:
        """Recycle the segments whose records all are numbered up to ``through``."""
        disk = self._disk
        while len(disk.segments) > 1 and disk.segments[1].first <= through + 1:
            gone = disk.segments.pop(0)
            if len(disk.spares) < 2:
                disk.spares.append(gone.data)

    def _prepare(self, at_least: int) -> bool:
        if self._disk.full:
            return False
        # Small ones are deleted: the largest records have grown.
        self._disk.spares = [spare for spare in self._disk.spares if len(spare) >= at_least]
        self._disk.spares.append(bytearray(max(SEGMENT_BYTES, 2 * at_least)))
        return True

    def _room_for(self, size: int) -> MemorySegment:
        if self._open is not None and self._offset + size <= len(self._open.data):
            return self._open
        disk = self._disk
        if not any(len(spare) >= size for spare in disk.spares) and not self._prepare(size):
            raise Violation(f"a push was accepted, and there is no room for its record of {size} bytes")
        chosen = next(at for at, spare in enumerate(disk.spares) if len(spare) >= size)
        self._open = MemorySegment(self.number, disk.spares.pop(chosen))
        self._offset = 0
        disk.segments.append(self._open)
        return self._open


class Mapped:
    """The segments of a disk as files that Scan can map, for as long as this is open."""

    def __init__(self, segments: list[MemorySegment]) -> None:
        self.segments: list[Segment] = []
        self._descriptors: list[int] = []
        for segment in segments:
            descriptor = os.memfd_create(f"segment-{segment.first}")
            os.write(descriptor, segment.data)
            self._descriptors.append(descriptor)
            self.segments.append(Segment(Path(f"/proc/self/fd/{descriptor}"), segment.first))

    def __enter__(self) -> Mapped:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


def place_of(end: End | None) -> tuple[int, int] | None:
    """Where a scan ended, as DiskLog takes it."""
    return None if end is None else (end.segment.first, end.offset)


__all__ = ["Disk", "DiskLog", "Mapped", "SavedSnapshot", "Scan", "place_of"]
