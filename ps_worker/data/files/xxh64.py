"""XXH64 of many strings at once, compiled: the ids of strings. Imports numba: imported where strings are hashed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ps_protocol.model.kernels import kernel

_P1, _P2, _P3 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
_P4, _P5 = np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5)


@kernel("uint64(uint64, uint64)", inline="always")
def _rotated(bits: Any, by: Any) -> Any:
    return (bits << by) | (bits >> (np.uint64(64) - by))


@kernel("uint64(uint64, uint64)", inline="always")
def _round(lane: Any, word: Any) -> Any:
    return _rotated(lane + word * _P2, np.uint64(31)) * _P1


@kernel("uint64(uint64, uint64)", inline="always")
def _merged(digest: Any, lane: Any) -> Any:
    return (digest ^ _round(np.uint64(0), lane)) * _P1 + _P4


@kernel("uint64(Array(uint8, 1, 'C', readonly=True), int64, int64)", inline="always")
def _word(data: Any, at: Any, size: Any) -> Any:
    """``size`` bytes from ``at``, little-endian."""
    value = np.uint64(0)
    for i in range(size):
        value |= np.uint64(data[at + i]) << np.uint64(8 * i)
    return value


@kernel("void(Array(uint8, 1, 'C', readonly=True), Array(int64, 1, 'C', readonly=True), uint64, int64[::1])")
def _hash(data: Any, offsets: Any, seed: Any, out: Any) -> None:
    for i in range(out.size):
        at, end = offsets[i], offsets[i + 1]
        size = np.uint64(end - at)
        if end - at >= 32:
            a, b, c, d = seed + _P1 + _P2, seed + _P2, seed, seed - _P1
            while at + 32 <= end:
                a = _round(a, _word(data, at, 8))
                b = _round(b, _word(data, at + 8, 8))
                c = _round(c, _word(data, at + 16, 8))
                d = _round(d, _word(data, at + 24, 8))
                at += 32
            digest = _rotated(a, np.uint64(1)) + _rotated(b, np.uint64(7))
            digest += _rotated(c, np.uint64(12)) + _rotated(d, np.uint64(18))
            digest = _merged(_merged(_merged(_merged(digest, a), b), c), d)
        else:
            digest = seed + _P5
        digest += size
        while at + 8 <= end:
            digest = _rotated(digest ^ _round(np.uint64(0), _word(data, at, 8)), np.uint64(27)) * _P1 + _P4
            at += 8
        if at + 4 <= end:
            digest = _rotated(digest ^ (_word(data, at, 4) * _P1), np.uint64(23)) * _P2 + _P3
            at += 4
        while at < end:
            digest = _rotated(digest ^ (np.uint64(data[at]) * _P5), np.uint64(11)) * _P1
            at += 1
        digest = (digest ^ (digest >> np.uint64(33))) * _P2
        digest = (digest ^ (digest >> np.uint64(29))) * _P3
        out[i] = np.int64(digest ^ (digest >> np.uint64(32)))


def xxh64(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.int64]:
    """XXH64 (Collet; the specification is in the xxHash repository) of string i, the bytes ``offsets[i]`` to
    ``offsets[i + 1]`` of ``data``, as signed numbers. int64 [n].
    """
    out = np.empty(max(0, offsets.size - 1), np.int64)
    _hash(data, offsets, np.uint64(seed % 2**64), out)
    return out
