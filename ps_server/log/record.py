"""How one record lies in a segment file: a header, the record's message, its bytes; all under checksums."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import xxhash

ALIGNMENT_BYTES = 64
"""Records begin at multiples of this."""

_MAGIC = b"tpsl"

#: magic, number, life, message bytes, payload bytes, checksum of message and payload, writer, checksum of all the rest.
_HEADER = struct.Struct("<4s4xQQQQQQQ")

HEADER_BYTES = _HEADER.size


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed part of a record."""

    #: Place of the record in the log, from 1; each is one more than the last.
    number: int
    #: Rises each time a process opens the log: what an earlier life left behind a torn end is told from what follows.
    life: int
    message_bytes: int
    payload_bytes: int
    #: xxh3_64 of message and payload.
    checksum: int
    #: The incarnation that appended it to its log first. Copies keep it: two logs that have a record of one number and
    #: writer have the same records before it, too (Ongaro and Ousterhout 2014, section 5.3, "Log Matching").
    writer: int = 0

    @property
    def record_bytes(self) -> int:
        """Bytes of the whole record, up to where the next begins."""
        return padded(HEADER_BYTES + self.message_bytes + self.payload_bytes)

    def encode(self) -> bytes:
        """The header as it is written."""
        fields = (self.number, self.life, self.message_bytes, self.payload_bytes, self.checksum)
        bare = _HEADER.pack(_MAGIC, *fields, 0, self.writer)
        return _HEADER.pack(_MAGIC, *fields, xxhash.xxh3_64_intdigest(bare), self.writer)


def decode_header(data: memoryview) -> Header | None:
    """The header at the beginning of ``data``, None where there is none."""
    if len(data) < HEADER_BYTES or data[:4] != _MAGIC:
        return None
    magic, number, life, message_bytes, payload_bytes, checksum, _, writer = _HEADER.unpack_from(data)
    header = Header(number, life, message_bytes, payload_bytes, checksum, writer)
    return header if bytes(data[:HEADER_BYTES]) == header.encode() and magic == _MAGIC else None


def padded(size: int) -> int:
    """``size`` rounded up to where a record may begin."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def encode_record(
    number: int, life: int, message: bytes, payload: Sequence[memoryview], writer: int = 0
) -> list[memoryview]:
    """What is written for one record, in order: header and message, the payload as it lies, padding."""
    digest = xxhash.xxh3_64(message)
    for piece in payload:
        digest.update(piece)
    header = Header(number, life, len(message), sum(map(len, payload)), digest.intdigest(), writer)
    return _with_fill(header, [memoryview(header.encode() + message), *payload])


def copy_record(header: Header, life: int, body: memoryview) -> list[memoryview]:
    """What is written for a record of another log: the same, but of a ``life`` of this one."""
    header = replace(header, life=life)
    return _with_fill(header, [memoryview(header.encode()), body])


def _with_fill(header: Header, pieces: list[memoryview]) -> list[memoryview]:
    fill = header.record_bytes - HEADER_BYTES - header.message_bytes - header.payload_bytes
    return [*pieces, memoryview(bytes(fill))] if fill else pieces


def body_is_whole(header: Header, body: memoryview) -> bool:
    """Whether ``body``, message and payload, is what the header was written for."""
    return len(body) == header.message_bytes + header.payload_bytes and (
        xxhash.xxh3_64_intdigest(body) == header.checksum
    )
