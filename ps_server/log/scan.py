"""Reads a log from its files: whole records in order, told where it ends torn and where it is damaged."""

from __future__ import annotations

import mmap
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np

from ps_protocol.errors import DamagedData
from ps_server.log.record import ALIGNMENT_BYTES, HEADER_BYTES, Header, body_is_whole, decode_header
from ps_server.log.segments import Segment

_MAGIC_WORD = np.frombuffer(b"tpsl", np.uint32)[0]


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

    segment: Segment
    offset: int
    number: int
    #: The bytes there are the beginning of a record that was never finished.
    torn: bool


class Scan:
    """Iterated once, by recovery. ``end`` is known afterwards; None when there is no segment.

    Raises DamagedData, naming segment and offset, when something is wrong that is not the end.
    """

    def __init__(self, segments: list[Segment], after: int) -> None:
        """``after``: records up to this number are passed over; the log must begin no later than behind it."""
        self._segments = segments
        self._after = after
        self._life = 0
        #: Who wrote the last record read, also of those passed over.
        self.writer = 0
        self.end: End | None = None

    def __iter__(self) -> Iterator[Record]:
        number = self._segments[0].first if self._segments else self._after + 1
        if number > self._after + 1:
            raise self._damaged(self._segments[0], 0, f"record {self._after + 1} and those after it are missing")
        for at, segment in enumerate(self._segments):
            following = self._segments[at + 1].first if at + 1 < len(self._segments) else None
            number = yield from self._read(segment, number, following)

    def _read(self, segment: Segment, number: int, following: int | None) -> Generator[Record, None, int]:
        """The records of one segment; returns the number of the next."""
        data, offset = _mapped(segment), 0
        while (header := self._record_at(data, offset, number)) is not None:
            if number > self._after:
                yield _record(header, data[offset + HEADER_BYTES : offset + header.record_bytes])
            self._life, self.writer = header.life, header.writer
            number, offset = number + 1, offset + header.record_bytes
        if following is None:
            self._check_nothing_later(segment, data, offset, number)
            torn = (header := decode_header(data[offset:])) is not None and header.number == number
            self.end = End(segment, offset, number, torn)
        elif following != number:
            raise self._damaged(segment, offset, f"record {number} is damaged, and later ones are there")
        return number

    def _record_at(self, data: memoryview, offset: int, number: int) -> Header | None:
        """The header of record ``number`` if it lies whole at ``offset``."""
        header = decode_header(data[offset : offset + HEADER_BYTES])
        if header is None or header.number != number or header.life < self._life:
            return None
        body = data[offset + HEADER_BYTES :][: header.message_bytes + header.payload_bytes]
        return header if body_is_whole(header, body) else None

    def _check_nothing_later(self, segment: Segment, data: memoryview, offset: int, number: int) -> None:
        """Raises DamagedData when a record of this or a later life lies behind the one that cannot be read."""
        whole = len(data) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        words = np.frombuffer(data[:whole], np.uint32)[:: ALIGNMENT_BYTES // 4]
        starts = np.flatnonzero(words[offset // ALIGNMENT_BYTES + 1 :] == _MAGIC_WORD) * ALIGNMENT_BYTES
        for start in (int(begin) + offset + ALIGNMENT_BYTES for begin in starts):
            header = decode_header(data[start : start + HEADER_BYTES])
            if header is not None and header.number > number and header.life >= self._life:
                raise self._damaged(segment, offset, f"record {number} is damaged, and record {header.number} follows")

    def _damaged(self, segment: Segment, offset: int, what: str) -> DamagedData:
        return DamagedData(
            f"the log of updates is damaged in {segment.path} at byte {offset}: {what}",
            expected=f"records without a gap from number {self._after + 1} on",
            remedy="nothing was changed: restore the data directory from a copy, or start with an empty one and a "
            "checkpoint",
        )


def _mapped(segment: Segment) -> memoryview:
    """The bytes of a segment, mapped for as long as anybody holds a part of them."""
    with segment.path.open("rb") as file:
        empty = segment.size_bytes == 0
        return memoryview(b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _record(header: Header, body: memoryview) -> Record:
    message = bytes(body[: header.message_bytes])
    payload = body[header.message_bytes : header.message_bytes + header.payload_bytes]
    return Record(header.number, header.life, message, payload, header.writer)
