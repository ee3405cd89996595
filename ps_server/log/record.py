"""How one record is laid out and written: header, message, payload, a mark at its end; all under checksums."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import xxhash

ALIGNMENT_BYTES = 64
"""Records begin at multiples of this."""

MESSAGE_BYTES = 64 << 10
"""More than the message of a record takes, without its payload."""

_PIECES = 512
"""How many pieces one system call takes; Linux allows 1,024."""

_MAGIC = b"tps2"

_END_MAGIC = b"tpse"

#: magic, records before it that were written with it, number, life, message bytes, payload bytes, checksum of message
#: and payload, checksum of all the rest, writer.
_HEADER = struct.Struct("<4sIQQQQQQQ")

HEADER_BYTES = _HEADER.size

#: magic, number, life, checksum of these.
_END = struct.Struct("<4s4xQQQ")

END_BYTES = _END.size

#: The first words of headers and end marks, little-endian.
HEADER_WORD = int.from_bytes(_MAGIC, "little")
END_WORD = int.from_bytes(_END_MAGIC, "little")


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed part of a record."""

    #: Place of the record in the log, from 1; each is one more than the last.
    number: int
    #: Rises each time a process opens the log: it separates new records from those that an earlier life left there.
    life: int
    message_bytes: int
    payload_bytes: int
    #: xxh3_64 of message and payload.
    checksum: int
    #: The incarnation that appended it to its log first. Copies keep it: two logs that have a record of one number and
    #: writer have the same records before it, too (Ongaro and Ousterhout 2014, section 5.3, "Log Matching").
    writer: int = 0
    #: So many records right before it were written with it, and waited for together: after a loss of power it may be
    #: there and one of them not.
    behind: int = 0

    @property
    def record_bytes(self) -> int:
        """Bytes of the whole record, up to where the next begins."""
        return padded(HEADER_BYTES + self.message_bytes + self.payload_bytes + END_BYTES)

    def encode(self) -> bytes:
        """The header as it is written."""
        fields = (self.number, self.life, self.message_bytes, self.payload_bytes, self.checksum)
        bare = _HEADER.pack(_MAGIC, self.behind, *fields, 0, self.writer)
        return _HEADER.pack(_MAGIC, self.behind, *fields, xxhash.xxh3_64_intdigest(bare), self.writer)


def decode_header(data: memoryview) -> Header | None:
    """The header at the beginning of ``data``, None where there is none."""
    if len(data) < HEADER_BYTES or data[:4] != _MAGIC:
        return None
    _, behind, number, life, message_bytes, payload_bytes, checksum, _, writer = _HEADER.unpack_from(data)
    header = Header(number, life, message_bytes, payload_bytes, checksum, writer, behind)
    return header if bytes(data[:HEADER_BYTES]) == header.encode() else None


def decode_end(data: memoryview) -> tuple[int, int] | None:
    """Number and life of the record that the end mark ``data`` belongs to, None where there is none."""
    if len(data) < END_BYTES or data[:4] != _END_MAGIC:
        return None
    _, number, life, _ = _END.unpack_from(data)
    return (number, life) if bytes(data[:END_BYTES]) == _end(number, life) else None


def _end(number: int, life: int) -> bytes:
    bare = _END.pack(_END_MAGIC, number, life, 0)
    return _END.pack(_END_MAGIC, number, life, xxhash.xxh3_64_intdigest(bare))


def padded(size: int) -> int:
    """``size`` rounded up to where a record may begin."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def record_bytes(payload_bytes: int) -> int:
    """The most bytes of a record with a payload of ``payload_bytes``."""
    return padded(HEADER_BYTES + MESSAGE_BYTES + payload_bytes)


def encode_record(
    number: int, life: int, message: bytes, payload: Sequence[memoryview], writer: int = 0, behind: int = 0
) -> list[memoryview]:
    """What is written for one record, in order: header and message, payload, padding, end mark."""
    digest = xxhash.xxh3_64(message)
    for piece in payload:
        digest.update(piece)
    header = Header(number, life, len(message), sum(map(len, payload)), digest.intdigest(), writer, behind)
    return _with_end(header, [memoryview(header.encode() + message), *payload])


def copy_record(header: Header, life: int, body: memoryview) -> list[memoryview]:
    """What is written for a record of another log: the same, but of a ``life`` of this one, and alone."""
    header = replace(header, life=life, behind=0)
    return _with_end(header, [memoryview(header.encode()), body])


def _with_end(header: Header, pieces: list[memoryview]) -> list[memoryview]:
    fill = header.record_bytes - HEADER_BYTES - header.message_bytes - header.payload_bytes - END_BYTES
    return [*pieces, memoryview(bytes(fill) + _end(header.number, header.life))]


def body_is_whole(header: Header, body: memoryview) -> bool:
    """Whether ``body``, message and payload, is what the header was written for."""
    return len(body) == header.message_bytes + header.payload_bytes and (
        xxhash.xxh3_64_intdigest(body) == header.checksum
    )


def write_at(descriptor: int, pieces: Sequence[memoryview], offset: int) -> int:
    """Write ``pieces`` one behind the other from ``offset``; returns where they end. Raises OSError."""
    rest = [piece for piece in pieces if len(piece)]
    while rest:
        written = os.pwritev(descriptor, rest[:_PIECES], offset)
        offset += written
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if written:
            rest[0] = rest[0][written:]
    return offset
