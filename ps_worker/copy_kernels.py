"""Compiled map from id to row of a copy: open addressing with linear probing, removal by shifting back.

A slot holds a row's number, or -1. Keys are not stored again: they are the ids of the rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from ps_protocol.model.ids import mix
from ps_protocol.model.kernels import kernel

_IDS = types.Array(types.int64, 1, "C", readonly=True)
_I64 = types.int64[::1]


@njit(inline="always")
def _slot(id_: Any, slots: Any) -> Any:
    return np.int64((mix(id_) >> np.uint64(16)) & np.uint64(slots.size - 1))


@njit(inline="always")
def _search(id_: Any, slots: Any, keys: Any) -> Any:
    """The slot of ``id_``, or the free one where it would go."""
    slot = _slot(id_, slots)
    while slots[slot] >= 0 and keys[slots[slot]] != id_:
        slot = (slot + 1) & (slots.size - 1)
    return slot


@kernel(types.void(_IDS, _I64, _I64, _I64))
def find(ids: Any, slots: Any, keys: Any, found: Any) -> None:
    """The row of each id into ``found``, -1 where it has none."""
    for i in range(ids.size):
        found[i] = slots[_search(ids[i], slots, keys)]


@kernel(types.int64(_IDS, _I64, _I64, types.int64, _I64))
def put(ids: Any, slots: Any, keys: Any, count: Any, found: Any) -> Any:
    """As ``find``; ids without a row get new rows from ``count`` on. Returns the new count. There is room for them."""
    for i in range(ids.size):
        slot = _search(ids[i], slots, keys)
        if slots[slot] < 0:
            slots[slot] = count
            keys[count] = ids[i]
            count += 1
        found[i] = slots[slot]
    return count


@kernel(types.void(types.Array(types.float32, 2, "C", readonly=True), _I64, types.float32[:, ::1]))
def write(values: Any, found: Any, rows: Any) -> None:
    """``rows[found[i]] = values[i]``."""
    for i in range(found.size):
        for column in range(rows.shape[1]):
            rows[found[i], column] = values[i, column]


@kernel(types.void(types.int64, _I64, _I64))
def fill(count: Any, slots: Any, keys: Any) -> None:
    """Fill empty ``slots`` with the first ``count`` rows."""
    for row in range(count):
        slots[_search(keys[row], slots, keys)] = row


@njit(inline="always")
def _take_out(hole: Any, slots: Any, keys: Any) -> None:
    """Empty a slot, and shift back later entries of its chain (Knuth, TAOCP 3, 6.4, algorithm R)."""
    mask = slots.size - 1
    slot = (hole + 1) & mask
    while slots[slot] >= 0:
        home = _slot(keys[slots[slot]], slots)
        if (slot - home) & mask >= (slot - hole) & mask:
            slots[hole] = slots[slot]
            hole = slot
        slot = (slot + 1) & mask
    slots[hole] = -1


@kernel(types.int64(_IDS, _I64, _I64, types.int64, types.float32[:, ::1]))
def remove(ids: Any, slots: Any, keys: Any, count: Any, rows: Any) -> Any:
    """Remove those that have a row; the last row moves into each gap. Returns the number of rows left."""
    for i in range(ids.size):
        slot = _search(ids[i], slots, keys)
        row = slots[slot]
        if row < 0:
            continue
        _take_out(slot, slots, keys)
        count -= 1
        if row == count:
            continue
        slots[_search(keys[count], slots, keys)] = row
        keys[row] = keys[count]
        for column in range(rows.shape[1]):
            rows[row, column] = rows[count, column]
    return count
