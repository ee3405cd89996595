"""Compiled maps from id to row, in all memory given by address: one open-addressing table per bucket.

A bucket's map is a block of ``capacity`` row numbers (uint32) and behind them ``capacity`` tags (uint8): 0 where
nothing is, else 8 bits of the id's hash. Its keys are not stored again: they are the ids of the rows. The hash is
``mix`` times a ``salt``, a secret odd number: chosen ids do not determine places (multiplicative hashing,
Dietzfelbinger et al. 1997). Places are hash * capacity >> 32, so a capacity may be any number; collisions go to the
next place (linear probing); a removal shifts back what is behind (Knuth, TAOCP 3, 6.4, algorithm R), so there are no
tombstones. A map is never full; a search goes once round a map at most, and returns ``NO_END`` where it finds no end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, types

from ps_protocol.model.ids import mix
from ps_protocol.model.kernels import kernel
from ps_server.tables.memory import IDS, bytes_at, prefetch, words_at

_I64 = types.int64[::1]
_SCRATCH = types.int64[:, ::1]
_U32 = types.uint32[::1]
_F32_2 = types.float32[:, ::1]

#: Number of ids whose memory is prefetched at once.
BLOCK = 128

#: How many ids the stages of a search are apart.
LEAD = 24

#: Of an id's number, what names its place in the memory for those between two stages.
RING = BLOCK - 1

#: What is kept for each id, and for one more.
_SCRATCH_SHAPE = 3, BLOCK + 1

#: Result of functions for a damaged map: full, or without a row that should exist.
NO_END = -2


def scratch() -> npt.NDArray[np.int64]:
    """Memory for one call of ``find``, ``insert`` or ``rehash``: they cannot allocate any."""
    return np.empty(_SCRATCH_SHAPE, np.int64)


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


@kernel(types.int64(IDS, types.uint64, _I64, _I64, _I64, _F32_2, _I64, _F32_2, _SCRATCH))
def find(
    ids: Any,
    salt: Any,
    addresses: Any,
    capacities: Any,
    keys: Any,
    values: Any,
    found: Any,
    out: Any,
    scratch: Any,
) -> Any:
    """The row of each id into ``found``, -1 where it has none, and what it holds into ``out``: as many columns.

    ``out`` has no columns where only the rows are wanted. What has no row stays as it is. Each id passes three stages,
    ``LEAD`` ids apart, and each stage asks for the memory that the next one reads, so that many reads overlap: the
    place, then the row's id and values. Returns how many ids have no row, or NO_END.
    """
    mask = np.uint64(capacities.size - 1)
    hashes, buckets, places = scratch[0], scratch[1], scratch[2]
    width, dim = values.shape[1], out.shape[1]
    missing = 0
    for first in range(ids.size + 2 * LEAD):
        if first < ids.size:
            bits = mix(ids[first])
            bucket = np.int64(bits & mask)
            bits *= salt
            hashes[first & RING] = np.int64(bits)
            buckets[first & RING] = bucket
            prefetch_place(bits, addresses[bucket], capacities[bucket])
        second = first - LEAD
        if 0 <= second < ids.size:
            bits = np.uint64(hashes[second & RING])
            bucket = buckets[second & RING]
            capacity = capacities[bucket]
            tags = tags_at(addresses[bucket], capacity)
            place = next_place(place_of(bits, capacity), tag_of(bits), tags)
            if place < 0:
                return np.int64(NO_END)
            places[second & RING] = place
            found[second] = -1
            if tags[place] != 0:
                row = np.int64(rows_at(addresses[bucket], capacity)[place])
                found[second] = row
                prefetch(keys, row)
                if dim > 0:
                    prefetch(values, row * width)
                    prefetch(values, row * width + dim - 1)
        i = second - LEAD
        if i >= 0:
            if found[i] >= 0 and keys[found[i]] != ids[i]:
                bits = np.uint64(hashes[i & RING])
                bucket = buckets[i & RING]
                rows = rows_at(addresses[bucket], capacities[bucket])
                tags = tags_at(addresses[bucket], capacities[bucket])
                place = find_from(places[i & RING], ids[i], tag_of(bits), rows, tags, keys)
                if place < 0:
                    return np.int64(NO_END)
                found[i] = rows[place] if tags[place] != 0 else -1
            row = found[i]
            missing += row < 0
            if row >= 0:
                for column in range(dim):
                    out[i, column] = values[row, column]
    return np.int64(missing)


@kernel(types.int64(IDS, types.uint64, types.int64, _I64, _I64, _I64, _I64, _I64, _SCRATCH))
def insert(
    ids: Any,
    salt: Any,
    count: Any,
    addresses: Any,
    capacities: Any,
    counts: Any,
    keys: Any,
    found: Any,
    scratch: Any,
) -> Any:
    """The row of each id into ``found``; those without get ``count``, ``count`` + 1, … Returns how many rows there are.

    No id comes twice; the maps have room. In stages as ``find``: what was put since the second is behind the place that
    it found, or at it. Returns NO_END, with some of the ids done, for a map that has no room.
    """
    mask = np.uint64(capacities.size - 1)
    hashes, buckets, places = scratch[0], scratch[1], scratch[2]
    for first in range(ids.size + 2 * LEAD):
        if first < ids.size:
            bits = mix(ids[first])
            bucket = np.int64(bits & mask)
            bits *= salt
            hashes[first & RING] = np.int64(bits)
            buckets[first & RING] = bucket
            prefetch_place(bits, addresses[bucket], capacities[bucket])
        second = first - LEAD
        if 0 <= second < ids.size:
            bits = np.uint64(hashes[second & RING])
            bucket = buckets[second & RING]
            capacity = capacities[bucket]
            tags = tags_at(addresses[bucket], capacity)
            place = next_place(place_of(bits, capacity), tag_of(bits), tags)
            if place < 0:
                return np.int64(NO_END)
            places[second & RING] = place
            if tags[place] != 0:
                prefetch(keys, np.int64(rows_at(addresses[bucket], capacity)[place]))
        i = second - LEAD
        if i >= 0:
            bits = np.uint64(hashes[i & RING])
            bucket = buckets[i & RING]
            rows = rows_at(addresses[bucket], capacities[bucket])
            tags = tags_at(addresses[bucket], capacities[bucket])
            place = find_from(places[i & RING], ids[i], tag_of(bits), rows, tags, keys)
            if place < 0:
                return np.int64(NO_END)
            # One place stays empty, or the next search would have no end; columns hold so many rows.
            if tags[place] == 0:
                if counts[bucket] + 1 >= tags.size or count >= keys.size:
                    return np.int64(NO_END)
                put(tag_of(bits), np.uint32(count), place, rows, tags)
                keys[count] = ids[i]
                counts[bucket] += 1
                found[i] = count
                count += 1
            else:
                found[i] = rows[place]
    return count


@kernel(types.int64(types.uint64, types.int64, types.int64, types.int64, types.int64, _I64, _SCRATCH))
def rehash(salt: Any, old: Any, old_capacity: Any, address: Any, capacity: Any, keys: Any, scratch: Any) -> Any:
    """All entries of one map into a new, empty one. Returns 0, or NO_END where they do not fit."""
    old_rows = rows_at(old, old_capacity)
    old_tags = tags_at(old, old_capacity)
    rows = rows_at(address, capacity)
    tags = tags_at(address, capacity)
    behind = 0
    for begin in range(0, old_capacity + BLOCK, BLOCK):
        # The ids of one block are asked for while those of the block before are put.
        moved, before = scratch[begin // BLOCK % 2], scratch[1 - begin // BLOCK % 2]
        count = 0
        for place in range(begin, min(old_capacity, begin + BLOCK)):
            moved[count] = old_rows[place]
            count += old_tags[place] != 0
        for i in range(count):
            prefetch(keys, moved[i])
        for i in range(behind):
            bits = mix(keys[before[i]]) * salt
            if not put(tag_of(bits), np.uint32(before[i]), place_of(bits, capacity), rows, tags):
                return NO_END
        behind = count
    return 0


@kernel(types.int64(types.int64, types.int64, _I64))
def rows_of(address: Any, capacity: Any, found: Any) -> Any:
    """The rows of one map, in its order, into ``found``. Returns 0, or NO_END where there are more or fewer."""
    rows = rows_at(address, capacity)
    tags = tags_at(address, capacity)
    count = 0
    for place in range(capacity):
        if tags[place] != 0:
            if count == found.size:
                return NO_END
            found[count] = rows[place]
            count += 1
    return 0 if count == found.size else NO_END


@njit(inline="always")
def place_of_row(bits: Any, row: Any, rows: Any, tags: Any) -> Any:
    """The place of an existing row; NO_END if it is not found."""
    place = place_of(bits, tags.size)
    for _ in range(tags.size):
        if tags[place] != 0 and rows[place] == row:
            return place
        place += 1
        if place == tags.size:
            place = 0
    return np.int64(NO_END)


@njit(inline="always")
def _take_out(hole: Any, salt: Any, rows: Any, tags: Any, keys: Any) -> None:
    """Empty a place, and shift back the entries after it."""
    capacity = tags.size
    place = hole
    for _ in range(capacity):
        place += 1
        if place == capacity:
            place = 0
        if tags[place] == 0:
            break
        home = place_of(mix(keys[rows[place]]) * salt, capacity)
        if (place - home) % capacity >= (place - hole) % capacity:
            rows[hole] = rows[place]
            tags[hole] = tags[place]
            hole = place
    tags[hole] = 0


@kernel(types.int64(IDS, types.uint64, types.int64, _I64, _I64, _I64, _I64, _I64, _U32, _F32_2))
def remove(
    ids: Any,
    salt: Any,
    count: Any,
    addresses: Any,
    capacities: Any,
    counts: Any,
    keys: Any,
    touched: Any,
    uses: Any,
    values: Any,
) -> Any:
    """Remove the rows of ids that have one, each once; each time the last of ``count`` rows moves into the gap.

    Returns 0, or NO_END, with some of the ids done, for one that has no row.
    """
    mask = np.uint64(capacities.size - 1)
    for i in range(ids.size):
        if i % BLOCK == 0:
            for ahead in range(min(BLOCK, ids.size - i, count)):
                for each in (ids[i + ahead], keys[count - 1 - ahead]):
                    bucket = np.int64(mix(each) & mask)
                    prefetch_place(mix(each) * salt, addresses[bucket], capacities[bucket])
        bits = mix(ids[i])
        bucket = np.int64(bits & mask)
        bits *= salt
        capacity = capacities[bucket]
        rows = rows_at(addresses[bucket], capacity)
        tags = tags_at(addresses[bucket], capacity)
        place = find_from(place_of(bits, capacity), ids[i], tag_of(bits), rows, tags, keys)
        if place < 0 or tags[place] == 0:
            return NO_END
        row = np.int64(rows[place])
        _take_out(place, salt, rows, tags, keys)
        counts[bucket] -= 1
        count -= 1
        if row == count:
            continue
        bits = mix(keys[count])
        bucket = np.int64(bits & mask)
        bits *= salt
        capacity = capacities[bucket]
        rows = rows_at(addresses[bucket], capacity)
        place = place_of_row(bits, count, rows, tags_at(addresses[bucket], capacity))
        if place < 0:
            return NO_END
        rows[place] = np.uint32(row)
        keys[row] = keys[count]
        touched[row] = touched[count]
        if uses.size > 0:
            uses[row] = uses[count]
        for column in range(values.shape[1]):
            values[row, column] = values[count, column]
    return 0
