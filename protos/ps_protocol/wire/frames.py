"""Payloads on the wire, written and read by hand: in chunks and inside other messages, each copied once each way.

A chunk is a field of the stream's message; chunks.py knows which. The readers take the canonical forms that these
writers produce; any other valid form is left to the generated class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Range

CHUNK_BYTES = 1 << 20
"""Default payload of one chunk: far below gRPC's default limit of 4 MB, so any client can read it."""

SPLIT_BYTES = 64 << 10
"""Messages above this size are worth to be split by hand: the generated class copies a payload twice."""

_HEAD_BYTES = 4 << 10
"""Where the payload of a message begins at the latest, for ``split_payload``; most begin within 100 bytes."""

_VARINT, _FIXED_64, _LENGTH_DELIMITED, _FIXED_32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED_64: 8, _FIXED_32: 4}
"""Wire types of protobuf, and the sizes of those of fixed size."""

_POSITION_TAG = (1 << 3) | 0
_PAYLOAD_TAG = (2 << 3) | 2


@lru_cache(256)
def varint(value: int) -> bytes:
    """``value``, 0 or more, as protobuf writes it. Sizes are mostly those of the step before."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, next position); raises IndexError at the end of ``data`` and ValueError above 64 bits."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if value >> 64:
            raise ValueError("varint too long")
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("varint too long")


@lru_cache(1024)
def chunk_head(field: int, position: int, size: int) -> bytes:
    """What precedes the ``size`` bytes of a payload in a stream message that holds one chunk, in canonical form."""
    inner = (bytes((_POSITION_TAG,)) + varint(position)) if position else b""
    inner += bytes((_PAYLOAD_TAG,)) + varint(size)
    return bytes(((field << 3) | 2,)) + varint(len(inner) + size) + inner


def encode_chunk(field: int, position: int, pieces: Sequence[memoryview | bytes]) -> bytes:
    """The bytes of a stream message that holds one chunk; ``pieces`` are joined once."""
    return b"".join((chunk_head(field, position, sum(map(len, pieces))), *pieces))


def parse_chunk(field: int, data: bytes) -> tuple[int, memoryview] | None:
    """(position, payload) when ``data`` is a chunk in canonical form, else None. Copies nothing, never raises."""
    if not data or data[0] != (field << 3) | 2:
        return None
    try:
        length, at = _read_varint(data, 1)
        if at + length != len(data):
            return None
        position = 0
        if data[at] == _POSITION_TAG:
            position, at = _read_varint(data, at + 1)
        if data[at] != _PAYLOAD_TAG:
            return None
        size, at = _read_varint(data, at + 1)
    except (IndexError, ValueError):
        return None
    return (position, memoryview(data)[at:]) if at + size == len(data) else None


def split_payload(data: bytes, payloads: Mapping[int, int]) -> tuple[int, bytes, memoryview] | None:
    """(number of the body's field, the body's other fields, its payload) of a message with a payload at its end.

    ``payloads``: by number of a body's field, that of the payload in the body. Copies only the other fields. None where
    ``data`` has another form, and where it is no message. Never raises.
    """
    try:
        tag, at = _read_varint(data, 0)
        length, begin = _read_varint(data, at)
        if tag & 7 != _LENGTH_DELIMITED or begin + length != len(data):
            return None
        number, at = tag >> 3, begin
        while at < begin + _HEAD_BYTES:
            end = at
            tag, at = _read_varint(data, at)
            if tag & 7 == _VARINT:
                _, at = _read_varint(data, at)
            elif tag & 7 == _LENGTH_DELIMITED:
                length, at = _read_varint(data, at)
                if tag >> 3 == payloads.get(number) and at + length == len(data):
                    return number, data[begin:end], memoryview(data)[at:]
                at += length
            else:
                at += _FIXED_BYTES[tag & 7]
    except (IndexError, KeyError, ValueError):
        pass
    return None


def pieces_of(region: memoryview, ranges: Iterable[Range]) -> list[memoryview]:
    """The ``ranges`` of ``region`` (bytes) as views."""
    return [region[begin:end] for begin, end in ranges]


def cut(pieces: Iterable[memoryview], chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, list[memoryview]]]:
    """Cut a payload, consecutive ``pieces`` of memory, into chunks: yields (position, pieces). Copies nothing."""
    position, chunk, size = 0, list[memoryview](), 0
    for piece in pieces:
        begin = 0
        while begin < len(piece):
            take = min(len(piece) - begin, chunk_bytes - size)
            chunk.append(piece[begin : begin + take])
            begin, size = begin + take, size + take
            if size == chunk_bytes:
                yield position, chunk
                position, chunk, size = position + size, [], 0
    if chunk:
        yield position, chunk


class Scatter:
    """Writes a payload's chunks into consecutive ``pieces`` of memory as they arrive. Used by one reader at a time."""

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._pieces = pieces
        self._index = 0
        self._offset = 0
        self.received_bytes = 0
        self.expected_bytes = sum(len(piece) for piece in pieces)

    @property
    def complete(self) -> bool:
        """Whether the whole payload has arrived."""
        return self.received_bytes == self.expected_bytes

    def write(self, position: int, payload: memoryview) -> None:
        """Copy one chunk into place. Raises InvalidRequest when it is not the next piece of the payload."""
        size = len(payload)
        missing = self.expected_bytes - self.received_bytes
        if position != self.received_bytes or size > missing:
            raise InvalidRequest(
                "a chunk does not continue its payload",
                expected=f"position {self.received_bytes} and at most {missing} bytes",
                actual=f"position {position} and {size} bytes",
                remedy="send the payload's chunks in order, as docs/protocol.md lays them out",
            )
        done = 0
        while done < size:
            piece = self._pieces[self._index]
            take = min(len(piece) - self._offset, size - done)
            piece[self._offset : self._offset + take] = payload[done : done + take]
            done += take
            self._offset += take
            if self._offset == len(piece):
                self._index, self._offset = self._index + 1, 0
        self.received_bytes += size
