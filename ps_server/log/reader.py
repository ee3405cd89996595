"""Reads a log while it is written: the bytes of its records, and records from such bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ps_protocol.errors import Unavailable
from ps_server.log.durable import DurableLog
from ps_server.log.record import HEADER_BYTES, Header, body_is_whole, decode_header
from ps_server.log.segments import LogSegment, live_segments

PIECE_BYTES = 1 << 20
"""The most that is read at a time."""


class LogReader:
    """Reads one log for one standby, from one thread at a time, while the executor appends.

    ``DurableLog.read_from`` keeps what it reads from being cut away. Where that happens all the same, it raises
    Unavailable.
    """

    def __init__(self, log: DurableLog, after: int) -> None:
        """Read the records behind number ``after``."""
        self._log = log
        #: The next record.
        self._next = after + 1
        self._descriptor = -1
        self._offset = 0
        #: Bytes of the record before ``_next`` that are still to be read.
        self._left = 0

    @property
    def number(self) -> int:
        """The last record that was read, at least in part."""
        return self._next - 1

    @property
    def whole(self) -> int:
        """The last record that was read to its end."""
        return self._next - (2 if self._left else 1)

    def close(self) -> None:
        """Repeatable."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def is_behind(self, writer: int) -> bool:
        """Whether what it would read continues a log whose last record was written by ``writer``.

        Records of one number and one writer have the same records before them.
        """
        number = self._next - 1
        if number == 0:
            # In this order: a record written between the two looks would be seen without its file.
            return not self._log.whole or live_segments(self._log.path)[0].first == 1
        if not writer or number > self._log.whole:
            return False
        try:
            self._next = number
            self._seek()
            header = self._header()
        except Unavailable:
            return False
        self._next, self._offset = number + 1, self._offset + header.record_bytes
        return header.writer == writer

    def read(self) -> bytes:
        """Some bytes more of the records that are written whole; empty when there are none. Raises Unavailable."""
        begin, descriptor = self._offset, self._descriptor
        while self._offset - begin < PIECE_BYTES:
            if not self._left:
                if self._next > self._log.whole:
                    break
                if self._descriptor < 0 or self._number_here() != self._next:
                    if self._offset > begin and descriptor >= 0:
                        break  # what has been read is in the segment before
                    self._seek()
                    begin, descriptor = self._offset, self._descriptor
                self._left = self._header().record_bytes
                self._next += 1
            size = min(self._left, PIECE_BYTES - (self._offset - begin))
            self._left -= size
            self._offset += size
        return os.pread(descriptor, self._offset - begin, begin) if self._offset > begin else b""

    def _number_here(self) -> int:
        header = decode_header(memoryview(os.pread(self._descriptor, HEADER_BYTES, self._offset)))
        return header.number if header else 0

    def _header(self) -> Header:
        header = decode_header(memoryview(os.pread(self._descriptor, HEADER_BYTES, self._offset)))
        if header is None or header.number != self._next:
            raise self._gone()
        return header

    def _seek(self) -> None:
        """Find the beginning of record ``_next``. Raises Unavailable."""
        self.close()
        holding: list[LogSegment] = [s for s in live_segments(self._log.path) if s.first <= self._next]
        if not holding:
            raise self._gone()
        try:
            self._descriptor = os.open(holding[-1].path, os.O_RDONLY)
        except FileNotFoundError:
            raise self._gone() from None
        self._offset = 0
        wanted, self._next = self._next, holding[-1].first
        while self._next < wanted:
            self._offset += self._header().record_bytes
            self._next += 1

    def _gone(self) -> Unavailable:
        return Unavailable(
            f"record {self._next} is not in the log any more",
            remedy="a standby begins again with a copy; a larger --log-mb lets it be away for longer",
        )


class RecordParser:
    """Makes records of the bytes that the LogReader of another process read. Used by one standby."""

    def __init__(self) -> None:
        self._buffer, self._other = bytearray(), bytearray()
        #: Bytes of the buffer that belong to a record whose rest has not come.
        self._held = 0

    def feed(self, data: memoryview) -> Iterator[tuple[Header, memoryview]]:
        """Yields header and body of each record that is whole now; views that hold until the next call.

        Raises Unavailable for bytes that are no record: what was sent has been overwritten meanwhile.
        """
        while len(data):
            if self._held:
                data = data[self._gather(data) :]
                whole = self._whole(memoryview(self._buffer)[: self._held])
                if whole is None:
                    continue
                self._held = 0
                # What is yielded stays valid while the beginning of the next record is kept.
                self._buffer, self._other = self._other, self._buffer
                yield whole
            elif (whole := self._whole(data)) is not None:
                data = data[whole[0].record_bytes :]
                yield whole
            else:
                data = data[self._gather(data) :]

    def _gather(self, data: memoryview) -> int:
        """Take of ``data`` what is missing of the header, else of the record; returns how much."""
        wanted = HEADER_BYTES
        if self._held >= HEADER_BYTES or (not self._held and len(data) >= HEADER_BYTES):
            head = memoryview(self._buffer) if self._held else data
            wanted = _decoded(head[:HEADER_BYTES]).record_bytes
        if len(self._buffer) < wanted:
            self._buffer = self._buffer[: self._held] + bytearray(wanted - self._held)
        size = min(wanted - self._held, len(data))
        self._buffer[self._held : self._held + size] = data[:size]
        self._held += size
        return size

    def _whole(self, data: memoryview) -> tuple[Header, memoryview] | None:
        if len(data) < HEADER_BYTES:
            return None
        header = _decoded(data[:HEADER_BYTES])
        if len(data) < header.record_bytes:
            return None
        body = data[HEADER_BYTES:][: header.message_bytes + header.payload_bytes]
        if not body_is_whole(header, body):
            raise Unavailable(f"record {header.number} arrived damaged")
        return header, body


def _decoded(data: memoryview) -> Header:
    header = decode_header(data)
    if header is None:
        raise Unavailable("the bytes received are not a record of a log")
    return header
