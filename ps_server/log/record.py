"""How one record lies in a segment file: a header, the record's message, its bytes; all under checksums."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

ALIGNMENT_BYTES = 64
"""Records begin at multiples of this."""

_MAGIC = b"tpsl"

#: magic, number, life, message bytes, payload bytes, checksum of message and payload, checksum of all before.
_HEADER = struct.Struct("<4s4xQQQQQQ8x")

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

    @property
    def record_bytes(self) -> int:
        """Bytes of the whole record, up to where the next begins."""
        return padded(HEADER_BYTES + self.message_bytes + self.payload_bytes)

    def encode(self) -> bytes:
        """The header as it is written."""
        fields = (self.number, self.life, self.message_bytes, self.payload_bytes, self.checksum)
        bare = _HEADER.pack(_MAGIC, *fields, 0)
        return _HEADER.pack(_MAGIC, *fields, xxhash.xxh3_64_intdigest(bare))


def decode_header(data: memoryview) -> Header | None:
    """The header at the beginning of ``data``, None where there is none."""
    if len(data) < HEADER_BYTES or data[:4] != _MAGIC:
        return None
    magic, *fields, _ = _HEADER.unpack_from(data)
    header = Header(*fields)
    return header if bytes(data[:HEADER_BYTES]) == header.encode() and magic == _MAGIC else None


def padded(size: int) -> int:
    """``size`` rounded up to where a record may begin."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def encode_record(number: int, life: int, message: bytes, payload: Sequence[memoryview]) -> list[memoryview]:
    """What is written for one record, in order: header and message, the payload as it lies, padding."""
    digest = xxhash.xxh3_64(message)
    for piece in payload:
        digest.update(piece)
    header = Header(number, life, len(message), sum(map(len, payload)), digest.intdigest())
    fill = header.record_bytes - HEADER_BYTES - header.message_bytes - header.payload_bytes
    pieces = [memoryview(header.encode() + message), *payload]
    return [*pieces, memoryview(bytes(fill))] if fill else pieces


def body_is_whole(header: Header, body: memoryview) -> bool:
    """Whether ``body``, message and payload, is what the header was written for."""
    return len(body) == header.message_bytes + header.payload_bytes and (
        xxhash.xxh3_64_intdigest(body) == header.checksum
    )
