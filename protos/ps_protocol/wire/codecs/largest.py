"""Decides which k elements of a tensor are the largest in magnitude, exactly, in two passes and little memory.

A threshold is guessed from a sample, as in Lin et al., "Deep Gradient Compression" (2018); here the guess
decides only how long it takes, never the result.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ps_protocol.wire.codecs.codec import Elements

Indexes = npt.NDArray[np.int64]
#: Bits of a magnitude as a signed integer: ordered as the magnitudes are, infinity above all numbers, NaN above it.
Keys = npt.NDArray[Any]

_SCAN_ELEMENTS = 1 << 18
_SAMPLE_ELEMENTS = 1 << 16


def largest(values: Elements, k: int) -> Indexes:
    """Positions of the ``k`` elements of largest magnitude in ``values``, ascending.

    Of equal magnitudes the first are taken; NaN counts as larger than infinity. ``values`` is flat, float32 or
    float64; 1 <= ``k`` <= its length. Temporaries are of the order of ``k``.
    """
    bits = values.view(np.int32 if values.dtype == np.float32 else np.int64)
    floor = _guess(bits, k)
    found = _scan(bits, k, floor)
    if len(found) < k and floor > 1:
        found = _scan(bits, k, 1)
    return found if len(found) == k else _with_zeros(found, k)


def _guess(bits: Keys, k: int) -> int:
    """A key that probably a few more than ``k`` elements reach; at least 1, the smallest key that is not zero."""
    if len(bits) <= _SCAN_ELEMENTS:
        return 1
    # Odd, so that no power-of-two row length is hit at the same column each time.
    stride = len(bits) // _SAMPLE_ELEMENTS | 1
    sample = bits[::stride] & np.iinfo(bits.dtype).max
    expected = len(sample) * k / len(bits)
    rank = math.ceil(expected + 4.0 * math.sqrt(expected) + 4.0)
    if rank >= len(sample):
        return 1
    return max(1, int(np.partition(sample, len(sample) - rank)[len(sample) - rank]))


def _scan(bits: Keys, k: int, floor: int) -> Indexes:
    """Positions of the ``k`` largest keys from ``floor`` up, ascending; fewer where there are fewer."""
    magnitude = np.iinfo(bits.dtype).max
    keys = np.empty(min(_SCAN_ELEMENTS, len(bits)), bits.dtype)
    reached = np.empty(len(keys), np.bool_)
    found: list[Indexes] = []
    found_keys: list[Keys] = []
    count = 0
    for begin in range(0, len(bits), _SCAN_ELEMENTS):
        chunk = bits[begin : begin + _SCAN_ELEMENTS]
        n = len(chunk)
        np.bitwise_and(chunk, magnitude, out=keys[:n])
        np.greater_equal(keys[:n], floor, out=reached[:n])
        hits = np.flatnonzero(reached[:n])
        found.append(hits + begin)
        found_keys.append(keys[hits])
        count += len(hits)
        if count > 4 * k + _SCAN_ELEMENTS:
            best, best_keys = _first_largest(np.concatenate(found), np.concatenate(found_keys), k)
            found, found_keys, count = [best], [best_keys], k
            # From here on an equal key comes later than k others, so it loses.
            floor = int(best_keys.min()) + 1
    every, every_keys = np.concatenate(found), np.concatenate(found_keys)
    return every if count <= k else _first_largest(every, every_keys, k)[0]


def _first_largest(positions: Indexes, keys: Keys, k: int) -> tuple[Indexes, Keys]:
    """The ``k`` largest keys, the first ones of those that are equal to the last; ascending positions stay so."""
    bound = np.partition(keys, len(keys) - k)[len(keys) - k]
    taken = keys > bound
    ties = np.flatnonzero(keys == bound)[: k - int(np.count_nonzero(taken))]
    taken[ties] = True
    return positions[taken], keys[taken]


def _with_zeros(found: Indexes, k: int) -> Indexes:
    """``found``, all elements that are not zero, and the first zeros that make it ``k``."""
    zeros = np.setdiff1d(np.arange(k, dtype=np.int64), found, assume_unique=True)[: k - len(found)]
    return np.sort(np.concatenate([found, zeros]))
