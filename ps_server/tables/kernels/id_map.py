"""Compiled maps from id to row, in all memory given by address; ``map_places`` says what a map looks like."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from ps_protocol.model.ids import mix
from ps_protocol.model.kernels import kernel
from ps_server.tables.kernels.map_places import (
    BLOCK,
    LEAD,
    NO_END,
    RING,
    find_from,
    next_place,
    place_of,
    prefetch_place,
    put,
    rows_at,
    tag_of,
    tags_at,
)
from ps_server.tables.kernels.memory import IDS, prefetch

_I64 = types.int64[::1]
_SCRATCH = types.int64[:, ::1]
_U32 = types.uint32[::1]
_F32_2 = types.float32[:, ::1]


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
