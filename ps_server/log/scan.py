"""Reads the whole records of a log from its files, in order, and distinguishes a torn end from damage."""

from __future__ import annotations

import mmap
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np

from ps_protocol.errors import DamagedData
from ps_server.log.record import (
    ALIGNMENT_BYTES,
    END_BYTES,
    END_WORD,
    HEADER_BYTES,
    HEADER_WORD,
    Header,
    body_is_whole,
    decode_end,
    decode_header,
)
from ps_server.log.segments import LogSegment


@dataclass(frozen=True, slots=True)
class Record:
    """One whole record. ``payload`` is a view of the file."""

    number: int
    life: int
    message: bytes
    payload: memoryview
    #: See Header.
    writer: int = 0


@dataclass(frozen=True, slots=True)
class End:
    """Where a log ends: there, in that segment, its next record is written."""

    segment: LogSegment
    offset: int
    number: int
    #: The bytes there are the beginning of a record that cannot be read.
    torn: bool
    #: Offsets of end marks of that record in the segment: it had been written whole.
    marks: tuple[int, ...] = ()
    #: Offsets of later records that were written with it, and that no disk was waited for without it.
    later: tuple[int, ...] = ()


class Scan:
    """The records of a log, iterated once by recovery. ``end`` is set afterwards; None without a segment.

    Raises DamagedData, naming segment and offset, when something is wrong that is not the end.
    """

    def __init__(self, segments: list[LogSegment], after: int, *, in_order: bool = True) -> None:
        """``after``: records up to this number are passed over; the log must begin no later than behind it.

        ``in_order``: what was written first is there if what was written later is; False after a loss of power, when a
        last record that cannot be read may be one that was never finished, although its end is there, or records that
        were written with it.
        """
        self._segments = segments
        self._after = after
        self._in_order = in_order
        self._life = 0
        #: The writer of the last record read, also of those passed over.
        self.writer = 0
        #: What the records after ``after`` take.
        self.behind_bytes = 0
        self.end: End | None = None

    def __iter__(self) -> Iterator[Record]:
        number = self._segments[0].first if self._segments else self._after + 1
        if number > self._after + 1:
            raise self._damaged(self._segments[0], 0, f"record {self._after + 1} and those after it are missing")
        for at, segment in enumerate(self._segments):
            following = self._segments[at + 1].first if at + 1 < len(self._segments) else None
            number = yield from self._read(segment, number, following)

    def _read(self, segment: LogSegment, number: int, following: int | None) -> Generator[Record, None, int]:
        """The records of one segment; returns the number of the next."""
        data, offset = _mapped(segment), 0
        while (header := self._record_at(data, offset, number)) is not None:
            if number > self._after:
                self.behind_bytes += header.record_bytes
                yield _record(header, data[offset + HEADER_BYTES : offset + header.record_bytes])
            self._life, self.writer = header.life, header.writer
            number, offset = number + 1, offset + header.record_bytes
        if following is None:
            later = tuple(self._later(segment, data, offset, number))
            marks = tuple(self._end_marks(data, offset, number))
            if marks and self._in_order:
                raise self._damaged(segment, offset, f"record {number} was written whole, and is not what was written")
            torn = (header := decode_header(data[offset:])) is not None and header.number == number
            self.end = End(segment, offset, number, torn or bool(marks or later), marks, later)
        elif following != number:
            raise self._damaged(segment, offset, f"record {number} is damaged, and later ones are there")
        return number

    def _record_at(self, data: memoryview, offset: int, number: int) -> Header | None:
        """The header of record ``number`` if it is whole at ``offset``."""
        header = decode_header(data[offset : offset + HEADER_BYTES])
        if header is None or header.number != number or header.life < self._life:
            return None
        body = data[offset + HEADER_BYTES :][: header.message_bytes + header.payload_bytes]
        return header if body_is_whole(header, body) else None

    def _later(self, segment: LogSegment, data: memoryview, offset: int, number: int) -> Iterator[int]:
        """Offsets of later records that were written with the one that cannot be read.

        Raises DamagedData when a record of this or a later life follows that was not.
        """
        for start in _found(data, offset + ALIGNMENT_BYTES, HEADER_WORD):
            header = decode_header(data[start : start + HEADER_BYTES])
            if header is not None and header.number > number and header.life >= self._life:
                if not self._in_order and header.number - header.behind <= number:
                    yield start
                    continue
                raise self._damaged(segment, offset, f"record {number} is damaged, and record {header.number} follows")

    def _end_marks(self, data: memoryview, offset: int, number: int) -> Iterator[int]:
        """Offsets of end marks of record ``number`` behind ``offset``, of this or a later life."""
        for start in _found(data, offset + ALIGNMENT_BYTES - END_BYTES, END_WORD):
            end = decode_end(data[start : start + END_BYTES])
            if end is not None and end[0] == number and end[1] >= self._life:
                yield start

    def _damaged(self, segment: LogSegment, offset: int, what: str) -> DamagedData:
        return DamagedData(
            f"the log of updates is damaged in {segment.path} at byte {offset}: {what}",
            expected=f"records without a gap from number {self._after + 1} on",
            remedy="nothing was changed: restore the data directory from a copy, or start with an empty one and a "
            "checkpoint",
        )


def _found(data: memoryview, begin: int, word: int) -> Iterator[int]:
    """The offsets of ``word``, from ``begin`` on in steps of ALIGNMENT_BYTES."""
    rest = data[begin : len(data) // 4 * 4]
    every = np.frombuffer(rest, np.uint32)[:: ALIGNMENT_BYTES // 4]
    for place in np.flatnonzero(every == word).tolist():
        yield begin + place * ALIGNMENT_BYTES


def _mapped(segment: LogSegment) -> memoryview:
    """The bytes of a segment, mapped while a view of them exists."""
    with segment.path.open("rb") as file:
        empty = segment.size_bytes == 0
        return memoryview(b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _record(header: Header, body: memoryview) -> Record:
    message = bytes(body[: header.message_bytes])
    payload = body[header.message_bytes : header.message_bytes + header.payload_bytes]
    return Record(header.number, header.life, message, payload, header.writer)
