"""What the maps from id to row look like in memory: one open-addressing table per bucket, given by address.

A bucket's map is a block of ``capacity`` row numbers (uint32) and behind them ``capacity`` tags (uint8): 0 where
nothing is, else 8 bits of the id's hash. Its keys are not stored again: they are the ids of the rows. The hash is
``mix`` times a ``salt``, a secret odd number: chosen ids do not determine places (multiplicative
hashing, Dietzfelbinger et al. 1997). Places are hash * capacity >> 32, so a capacity may be any number; collisions go
to the next place (linear probing); a removal shifts back what is behind (Knuth, TAOCP 3, 6.4, algorithm R), so there
are no tombstones. A map is never full; a search goes once round a map and no further all the same, and what finds no
end there returns ``NO_END``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from ps_server.tables.kernels.memory import bytes_at, prefetch, words_at

#: Number of ids whose memory is prefetched at once.
BLOCK = 128

#: How many ids the stages of a search are apart.
LEAD = 24

#: Of an id's number, what names its place in the memory for those between two stages.
RING = BLOCK - 1

#: What is kept for each id, and for one more.
_SCRATCH = 3, BLOCK + 1

#: Result of functions for a damaged map: full, or without a row that should exist.
NO_END = -2


def scratch() -> npt.NDArray[np.int64]:
    """Memory for one call of ``find``, ``insert`` or ``rehash``: they cannot allocate any."""
    return np.empty(_SCRATCH, np.int64)


@njit(inline="always")
def rows_at(address: Any, capacity: Any) -> Any:
    """The row numbers of a map."""
    return words_at(address, capacity)


@njit(inline="always")
def tags_at(address: Any, capacity: Any) -> Any:
    """The tags of a map."""
    return bytes_at(address + 4 * capacity, capacity)


@njit(inline="always")
def place_of(bits: Any, capacity: Any) -> Any:
    """Where the search for a hash begins."""
    return np.int64(((bits >> np.uint64(32)) * np.uint64(capacity)) >> np.uint64(32))


@njit(inline="always")
def tag_of(bits: Any) -> Any:
    """The tag of a hash."""
    return max(np.uint8(bits >> np.uint64(24)), np.uint8(1))


@njit(inline="always")
def prefetch_place(bits: Any, address: Any, capacity: Any) -> None:
    """Ask for the memory where the search for a hash begins."""
    place = place_of(bits, capacity)
    prefetch(tags_at(address, capacity), place)
    prefetch(rows_at(address, capacity), place)


@njit(inline="always")
def next_place(place: Any, tag: Any, tags: Any) -> Any:
    """The first place from ``place`` that has this tag or is empty; NO_END if there is none."""
    rounds = 0
    while tags[place] != tag and tags[place] != 0:
        place += 1
        if place == tags.size:
            place = 0
            rounds += 1
            if rounds > 1:
                return np.int64(NO_END)
    return place


@njit(inline="always")
def find_from(place: Any, wanted: Any, tag: Any, rows: Any, tags: Any, keys: Any) -> Any:
    """The place of an id, or the empty one where the search for it ends, or NO_END."""
    for _ in range(tags.size + 1):
        place = next_place(place, tag, tags)
        if place < 0 or tags[place] == 0 or keys[rows[place]] == wanted:
            return place
        place += 1
        if place == tags.size:
            place = 0
    return np.int64(NO_END)


@njit(inline="always")
def put(tag: Any, row: Any, place: Any, rows: Any, tags: Any) -> Any:
    """Write to the first empty place from ``place``; returns whether there was one."""
    rounds = 0
    while tags[place] != 0:
        place += 1
        if place == tags.size:
            place = 0
            rounds += 1
            if rounds > 1:
                return False
    tags[place] = tag
    rows[place] = row
    return True
