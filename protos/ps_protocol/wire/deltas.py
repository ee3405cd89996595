"""Decides how a state of some bytes is written as what changed since another one: lossless, checked and compressed.

A delta is a header and one zstd frame:

    header   "psd1", encoding, size, changed, gaps, xxh3-128 of the base, xxh3-128 of the result, xxh3-64 of all others
    frame    overwrite, xor: the low bytes of all gaps, their high bytes, a byte for each one that changed
             dense xor: base XOR result, all of it

A gap is how many bytes stay before one that changes; where they are more, 65535 stands for as many that stay and no
change. ``overwrite`` has the new bytes, ``xor`` their difference from the base's; what is smallest is taken. Each part
begins a block of the frame, with statistics of its own.

Imports numba: only what makes or applies deltas imports this module.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from ps_protocol.errors import DamagedData, InvalidRequest
from ps_protocol.model.kernels import kernel

Bytes: TypeAlias = npt.NDArray[np.uint8]
Buffer: TypeAlias = memoryview | bytearray | bytes

_MAGIC = b"psd1"
_HEADER = struct.Struct("<4sB3xQQQ16s16s")
_SEAL = struct.Struct("<Q")

HEADER_BYTES: Final = _HEADER.size + _SEAL.size

LEVELS: Final = range(1, 20)
"""Of zstd. Those above 19 want more memory of a reader than ``_WINDOW_BYTES``."""

_WINDOW_BYTES = 1 << 23

_BLOCK_BYTES = 1 << 18
"""What is compared, or copied, changed and summed, at once: it stays in the processor's cache."""

_ONLY_GAP = 0xFFFF
"""The gap behind which nothing changes."""

_TRIED_DENSE = 16
"""Where one byte of so many changed, ``dense xor`` may be the smallest."""

_REMEDY = "ask for the full version"


class Encoding(enum.IntEnum):
    """How the bytes that changed are written; the numbers are part of the format."""

    OVERWRITE = 0
    XOR = 1
    DENSE_XOR = 2


@dataclass(frozen=True)
class DeltaHeader:
    """What a delta says of itself: it is as it was written, its frame has not been read yet."""

    encoding: Encoding
    #: Bytes of the base, and of the result.
    size: int
    #: Bytes in which they differ.
    changed: int
    #: How many there are; 0 for ``dense xor``.
    gaps: int
    #: Their checksums.
    base: bytes
    result: bytes


def checksum(data: Buffer) -> bytes:
    """xxh3-128 of ``data``: 16 bytes, the high one first."""
    return xxhash.xxh3_128_digest(data)


def encode_delta(base: Buffer, new: Buffer, *, level: int = 1) -> bytes | None:
    """What turns ``base`` into ``new``, or None where that is not smaller than ``new``.

    ``level``: of zstd, 1 to 19. Raises InvalidRequest where the two have different sizes, and for another level.
    """
    if level not in LEVELS:
        raise InvalidRequest("zstd has no such level here", expected="1 to 19", actual=str(level))
    old, now = _array(base), _array(new)
    _check_size("the new state", len(now), len(old))
    changes = _compare(old, now)
    frames = {}
    if changes.sparse:
        low, high, values, differences = (np.concatenate(parts) for parts in changes.parts)
        frames[Encoding.OVERWRITE] = _compressed((low, high, values), level, apart=True)
        frames[Encoding.XOR] = _compressed((low, high, differences), level, apart=True)
    if changes.changed * _TRIED_DENSE >= len(now) > 0:
        xor = (old[at : at + _BLOCK_BYTES] ^ now[at : at + _BLOCK_BYTES] for at in range(0, len(now), _BLOCK_BYTES))
        frames[Encoding.DENSE_XOR] = _compressed(xor, level, apart=False)
    encoding = min(frames, key=lambda each: len(frames[each]))
    frame = frames[encoding]
    if HEADER_BYTES + len(frame) >= len(now):
        return None
    gaps = 0 if encoding is Encoding.DENSE_XOR else changes.gaps
    sums = checksum(old.data), checksum(now.data)
    head = _HEADER.pack(_MAGIC, encoding, len(now), changes.changed, gaps, *sums)
    return b"".join((head, _seal(head, frame), frame))


def read_header(delta: Buffer) -> DeltaHeader:
    """The header of a whole delta. Raises DamagedData for one that is not as ``encode_delta`` made it."""
    view = memoryview(delta).cast("B")
    head, seal, frame = view[: _HEADER.size], view[_HEADER.size : HEADER_BYTES], view[HEADER_BYTES:]
    if head[: len(_MAGIC)] != _MAGIC[: len(head)]:
        raise DamagedData(
            "a delta has a format that this version of torch-ps does not read",
            expected=_MAGIC.decode(),
            actual=repr(bytes(head[: len(_MAGIC)])),
            remedy=_REMEDY,
        )
    if seal != _seal(head, frame):
        raise _damaged("its bytes do not have the checksum that was written with them")
    _, number, size, changed, gaps, base, result = _HEADER.unpack(head)
    try:
        header = DeltaHeader(Encoding(number), size, changed, gaps, base, result)
    except ValueError:
        raise _damaged(f"it has encoding {number}") from None
    dense = header.encoding is Encoding.DENSE_XOR
    if changed > size or (gaps != 0 if dense else not changed <= gaps <= (size - changed) // 2):
        raise _damaged(f"it changes {changed} bytes of {size} with {gaps} gaps")
    return header


def apply_delta(base: Buffer, delta: Buffer, out: memoryview | bytearray) -> None:
    """Write to ``out`` what ``delta`` makes of ``base``, which stays as it is.

    ``out`` has the size of ``base``, apart from it; all of it is written, and it is nothing where an error is raised.
    Memory: at most the size of ``base``. Raises DamagedData for a delta that is not as it was made, InvalidRequest
    where ``base`` is not what it was made from, or ``out`` has another size, can only be read or overlaps ``base``.
    """
    header = read_header(delta)
    old, made = _array(base), _array(out)
    _check_size("the base of a delta", len(old), header.size)
    _check_size("what a delta is applied to", len(made), header.size)
    if not made.flags.writeable or np.may_share_memory(old, made):
        raise InvalidRequest("a delta needs memory beside its base", remedy="give it a buffer that can be written")
    try:
        frame = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).stream_reader(
            memoryview(delta).cast("B")[HEADER_BYTES:]
        )
        digest = (_apply_dense if header.encoding is Encoding.DENSE_XOR else _apply_sparse)(header, frame, old, made)
        if frame.read(1):
            raise _damaged("its frame is longer than what changed")
    except zstandard.ZstdError as error:
        raise _damaged(f"its frame cannot be decompressed: {error}") from None
    if digest == header.result:
        return
    if (found := checksum(old.data)) != header.base:
        raise InvalidRequest(
            "a delta was made from another base",
            expected=f"checksum {header.base.hex()}",
            actual=f"checksum {found.hex()}",
            remedy=_REMEDY,
        )
    raise _damaged("its result does not have the checksum that it names")


# -- what changed


@dataclass
class _Changes:
    changed: int = 0
    gaps: int = 0
    #: Whether gaps and values are fewer bytes than the state has.
    sparse: bool = True
    #: Low and high bytes of gaps, new bytes, differences: of each block. Empty where not ``sparse``.
    parts: tuple[list[Bytes], ...] = field(default_factory=lambda: tuple([np.empty(0, np.uint8)] for _ in range(4)))


def _compare(old: Bytes, now: Bytes) -> _Changes:
    found = _Changes()
    differ = np.zeros(_BLOCK_BYTES, np.bool_)
    words = differ.view(np.uint64)
    room = np.empty((4, _BLOCK_BYTES + 1), np.uint8)
    #: Gaps and values of a block; the way since the last change or whole gap.
    state = np.zeros(3, np.int64)
    for at in range(0, len(now), _BLOCK_BYTES):
        was, is_ = old[at : at + _BLOCK_BYTES], now[at : at + _BLOCK_BYTES]
        if len(was) < _BLOCK_BYTES:
            differ[:] = False
        np.not_equal(was, is_, out=differ[: len(was)])
        if not found.sparse:
            found.changed += int(np.count_nonzero(differ))
            continue
        _find(words, was, is_, room[0], room[1], room[2], room[3], state)
        gaps, values, _ = (int(count) for count in state)
        found.gaps += gaps
        found.changed += values
        for kept, part, count in zip(found.parts, room, (gaps, gaps, values, values), strict=True):
            kept.append(part[:count].copy())
        if found.changed + 2 * found.gaps > len(now):
            found.sparse = False
            for kept in found.parts:
                kept.clear()
    return found


_READ = "Array(uint8, 1, 'C', readonly=True)"


@kernel(f"void(uint64[::1], {_READ}, {_READ}, uint8[::1], uint8[::1], uint8[::1], uint8[::1], int64[::1])")
def _find(words: Any, was: Any, now: Any, low: Any, high: Any, values: Any, differences: Any, state: Any) -> None:
    """Gaps and values of one block, whose ``words`` have a byte 1 for each that differs. ``state``: of ``_compare``."""
    gaps, count, way = 0, 0, state[2]
    for word in range((now.size + 7) // 8):
        bits = words[word]
        begin = 8 * word
        if bits == 0:
            way += min(8, now.size - begin)
            continue
        for at in range(begin, min(begin + 8, now.size)):
            if (bits >> np.uint64(8 * (at - begin))) & np.uint64(1) == 0:
                way += 1
                continue
            while way >= _ONLY_GAP:
                low[gaps] = high[gaps] = 0xFF
                gaps += 1
                way -= _ONLY_GAP
            low[gaps], high[gaps] = way & 0xFF, way >> 8
            gaps += 1
            values[count] = now[at]
            differences[count] = now[at] ^ was[at]
            count += 1
            way = 0
    state[0], state[1], state[2] = gaps, count, way


def _compressed(parts: Iterable[Bytes], level: int, *, apart: bool) -> bytes:
    """One frame of all parts; ``apart``: each begins a block."""
    packer = zstandard.ZstdCompressor(level=level, write_checksum=False).compressobj()
    pieces = []
    for part in parts:
        pieces.append(packer.compress(part.data))
        if apart:
            pieces.append(packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    pieces.append(packer.flush(zstandard.COMPRESSOBJ_FLUSH_FINISH))
    return b"".join(pieces)


# -- applied again: each returns the checksum of ``out``


def _apply_dense(header: DeltaHeader, frame: zstandard.ZstdDecompressionReader, old: Bytes, out: Bytes) -> bytes:
    digest = xxhash.xxh3_128()
    room = np.empty(_BLOCK_BYTES, np.uint8)
    for at in range(0, header.size, _BLOCK_BYTES):
        part = out[at : at + _BLOCK_BYTES]
        xor = room[: len(part)]
        _fill(xor, frame)
        np.bitwise_xor(old[at : at + _BLOCK_BYTES], xor, out=part)
        digest.update(part.data)
    return digest.digest()


def _apply_sparse(header: DeltaHeader, frame: zstandard.ZstdDecompressionReader, old: Bytes, out: Bytes) -> bytes:
    digest = xxhash.xxh3_128()
    low, high, values = (np.empty(count, np.uint8) for count in (header.gaps, header.gaps, header.changed))
    for part in (low, high, values):
        _fill(part, frame)
    kept = 0xFF if header.encoding is Encoding.XOR else 0
    state = np.zeros(3, np.int64)
    for at in range(0, header.size, _BLOCK_BYTES):
        block = out[at : at + _BLOCK_BYTES]
        block[:] = old[at : at + _BLOCK_BYTES]
        _change(low, high, values, kept, at, block, state)
        digest.update(block.data)
    gaps, changed, _ = (int(count) for count in state)
    if (gaps, changed) != (header.gaps, header.changed):
        raise _damaged(f"{changed} changes of {header.changed} are in {header.size} bytes")
    return digest.digest()


@kernel(f"void({_READ}, {_READ}, {_READ}, uint8, int64, uint8[::1], int64[::1])")
def _change(low: Any, high: Any, values: Any, kept: Any, begin: Any, block: Any, state: Any) -> None:
    """The changes of one block, which is at ``begin``; of its bytes the bits ``kept`` count.

    ``state``: gaps and values that are done, and where the next gap begins. Nothing outside of ``block`` is written.
    """
    # Without signs: an index is not looked at for being negative. Before the block, ``place`` wraps around.
    gap, value, place = np.uint64(state[0]), np.uint64(state[1]), np.uint64(state[2] - begin)
    gaps, count, size = np.uint64(low.size), np.uint64(values.size), np.uint64(block.size)
    while gap < gaps:
        way = np.uint64(low[gap]) | np.uint64(high[gap]) << np.uint64(8)
        at = place + way
        if way == np.uint64(_ONLY_GAP):
            place = at
        else:
            if at >= size or value == count:
                break
            block[at] = values[value] ^ (block[at] & kept)
            value += np.uint64(1)
            place = at + np.uint64(1)
        gap += np.uint64(1)
    state[0], state[1], state[2] = gap, value, np.int64(place) + begin


def _fill(room: Bytes, frame: zstandard.ZstdDecompressionReader) -> None:
    """Raises DamagedData where ``frame`` ends before ``room`` is full."""
    done = 0
    while done < len(room):
        count = frame.readinto(room[done:].data)
        if not count:
            raise _damaged("its frame is shorter than what changed")
        done += count


def _array(buffer: Buffer) -> Bytes:
    return np.frombuffer(buffer, np.uint8)


def _seal(head: Buffer, frame: Buffer) -> bytes:
    digest = xxhash.xxh3_64(head)
    digest.update(frame)
    return _SEAL.pack(digest.intdigest())


def _check_size(what: str, actual: int, expected: int) -> None:
    if actual != expected:
        raise InvalidRequest(
            f"{what} has another size than the delta's", expected=f"{expected} bytes", actual=f"{actual} bytes"
        )


def _damaged(reason: str) -> DamagedData:
    return DamagedData(f"a delta is damaged: {reason}", remedy=_REMEDY)
