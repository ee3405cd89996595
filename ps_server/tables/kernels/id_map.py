"""Compiled maps from id to row: one open-addressing table per bucket, all in memory given by address.

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
from numba import njit, types
from numba.np.numpy_support import carray

from ps_protocol.model.ids import mix
from ps_protocol.model.kernels import kernel
from ps_server.tables.kernels.memory import IDS, pointer, prefetch

#: Number of ids whose memory is prefetched at once.
_BLOCK = 128

#: Result of these functions for a damaged map: full, or without a row that should exist.
NO_END = -2

_I64 = types.int64[::1]
_U32 = types.uint32[::1]
_F32_2 = types.float32[:, ::1]


@njit(inline="always")
def _rows(address: Any, capacity: Any) -> Any:
    return carray(pointer(address), capacity, np.uint32)


@njit(inline="always")
def _tags(address: Any, capacity: Any) -> Any:
    return carray(pointer(address + 4 * capacity), capacity, np.uint8)


@njit(inline="always")
def _place(bits: Any, capacity: Any) -> Any:
    return np.int64(((bits >> np.uint64(32)) * np.uint64(capacity)) >> np.uint64(32))


@njit(inline="always")
def _tag(bits: Any) -> Any:
    return max(np.uint8(bits >> np.uint64(24)), np.uint8(1))


@njit(inline="always")
def _prefetch_place(bits: Any, address: Any, capacity: Any) -> None:
    place = _place(bits, capacity)
    prefetch(_tags(address, capacity), place)
    prefetch(_rows(address, capacity), place)


@njit(inline="always")
def _next(place: Any, tag: Any, tags: Any) -> Any:
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
def _find_from(place: Any, wanted: Any, tag: Any, rows: Any, tags: Any, keys: Any) -> Any:
    """The place of an id, or the empty one where the search for it ends, or NO_END."""
    for _ in range(tags.size + 1):
        place = _next(place, tag, tags)
        if place < 0 or tags[place] == 0 or keys[rows[place]] == wanted:
            return place
        place += 1
        if place == tags.size:
            place = 0
    return np.int64(NO_END)


@kernel(types.int64(IDS, types.uint64, _I64, _I64, _I64, _I64))
def find(ids: Any, salt: Any, addresses: Any, capacities: Any, keys: Any, found: Any) -> Any:
    """The row of each id into ``found``, -1 where it has none. Block by block, so that the reads of memory overlap.

    Returns 0, or NO_END.
    """
    mask = np.uint64(capacities.size - 1)
    hashes = np.empty(_BLOCK, np.uint64)
    buckets = np.empty(_BLOCK, np.int64)
    places = np.empty(_BLOCK, np.int64)
    for begin in range(0, ids.size, _BLOCK):
        end = min(ids.size, begin + _BLOCK)
        for i in range(begin, end):
            bits = mix(ids[i])
            bucket = np.int64(bits & mask)
            buckets[i - begin] = bucket
            bits *= salt
            hashes[i - begin] = bits
            _prefetch_place(bits, addresses[bucket], capacities[bucket])
        for i in range(begin, end):
            bits = hashes[i - begin]
            bucket = buckets[i - begin]
            capacity = capacities[bucket]
            tags = _tags(addresses[bucket], capacity)
            place = _next(_place(bits, capacity), _tag(bits), tags)
            if place < 0:
                return NO_END
            places[i - begin] = place
            found[i] = -1
            if tags[place] != 0:
                found[i] = _rows(addresses[bucket], capacity)[place]
                prefetch(keys, found[i])
        for i in range(begin, end):
            if found[i] >= 0 and keys[found[i]] != ids[i]:
                bits = hashes[i - begin]
                bucket = buckets[i - begin]
                rows = _rows(addresses[bucket], capacities[bucket])
                tags = _tags(addresses[bucket], capacities[bucket])
                place = _find_from(places[i - begin], ids[i], _tag(bits), rows, tags, keys)
                if place < 0:
                    return NO_END
                found[i] = rows[place] if tags[place] != 0 else -1
    return 0


@njit(inline="always")
def _put(tag: Any, row: Any, place: Any, rows: Any, tags: Any) -> Any:
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


@kernel(types.int64(IDS, types.uint64, types.int64, _I64, _I64, _I64, _I64, _I64))
def insert(ids: Any, salt: Any, count: Any, addresses: Any, capacities: Any, counts: Any, keys: Any, found: Any) -> Any:
    """The row of each id into ``found``; those without get ``count``, ``count`` + 1, … Returns how many rows there are.

    No id comes twice; the maps have room. Returns NO_END, with some of the ids done, for a map that has none.
    """
    mask = np.uint64(capacities.size - 1)
    hashes = np.empty(_BLOCK, np.uint64)
    buckets = np.empty(_BLOCK, np.int64)
    places = np.empty(_BLOCK, np.int64)
    for begin in range(0, ids.size, _BLOCK):
        end = min(ids.size, begin + _BLOCK)
        for i in range(begin, end):
            bits = mix(ids[i])
            bucket = np.int64(bits & mask)
            buckets[i - begin] = bucket
            bits *= salt
            hashes[i - begin] = bits
            _prefetch_place(bits, addresses[bucket], capacities[bucket])
        for i in range(begin, end):
            bits = hashes[i - begin]
            bucket = buckets[i - begin]
            capacity = capacities[bucket]
            tags = _tags(addresses[bucket], capacity)
            place = _next(_place(bits, capacity), _tag(bits), tags)
            if place < 0:
                return np.int64(NO_END)
            places[i - begin] = place
            if tags[place] != 0:
                prefetch(keys, np.int64(_rows(addresses[bucket], capacity)[place]))
        for i in range(begin, end):
            bits = hashes[i - begin]
            bucket = buckets[i - begin]
            rows = _rows(addresses[bucket], capacities[bucket])
            tags = _tags(addresses[bucket], capacities[bucket])
            place = _find_from(places[i - begin], ids[i], _tag(bits), rows, tags, keys)
            if place < 0:
                return np.int64(NO_END)
            # One place stays empty, or the next search would have no end; columns hold so many rows.
            if tags[place] == 0:
                if counts[bucket] + 1 >= tags.size or count >= keys.size:
                    return np.int64(NO_END)
                _put(_tag(bits), np.uint32(count), place, rows, tags)
                keys[count] = ids[i]
                counts[bucket] += 1
                found[i] = count
                count += 1
            else:
                found[i] = rows[place]
    return count


@kernel(types.int64(types.uint64, types.int64, types.int64, types.int64, types.int64, _I64))
def rehash(salt: Any, old: Any, old_capacity: Any, address: Any, capacity: Any, keys: Any) -> Any:
    """All entries of one map into a new, empty one. Returns 0, or NO_END where they do not fit."""
    old_rows = _rows(old, old_capacity)
    old_tags = _tags(old, old_capacity)
    rows = _rows(address, capacity)
    tags = _tags(address, capacity)
    moved = np.empty(_BLOCK + 1, np.int64)
    for begin in range(0, old_capacity, _BLOCK):
        count = 0
        for place in range(begin, min(old_capacity, begin + _BLOCK)):
            moved[count] = old_rows[place]
            count += old_tags[place] != 0
        for i in range(count):
            prefetch(keys, moved[i])
        for i in range(count):
            bits = mix(keys[moved[i]]) * salt
            if not _put(_tag(bits), np.uint32(moved[i]), _place(bits, capacity), rows, tags):
                return NO_END
    return 0


@kernel(types.int64(types.int64, types.int64, _I64))
def rows_of(address: Any, capacity: Any, found: Any) -> Any:
    """The rows of one map, in its order, into ``found``. Returns 0, or NO_END where there are more or fewer."""
    rows = _rows(address, capacity)
    tags = _tags(address, capacity)
    count = 0
    for place in range(capacity):
        if tags[place] != 0:
            if count == found.size:
                return NO_END
            found[count] = rows[place]
            count += 1
    return 0 if count == found.size else NO_END


@njit(inline="always")
def _place_of(bits: Any, row: Any, rows: Any, tags: Any) -> Any:
    """The place of an existing row; NO_END if it is not found."""
    place = _place(bits, tags.size)
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
        home = _place(mix(keys[rows[place]]) * salt, capacity)
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
        if i % _BLOCK == 0:
            for ahead in range(min(_BLOCK, ids.size - i, count)):
                for each in (ids[i + ahead], keys[count - 1 - ahead]):
                    bucket = np.int64(mix(each) & mask)
                    _prefetch_place(mix(each) * salt, addresses[bucket], capacities[bucket])
        bits = mix(ids[i])
        bucket = np.int64(bits & mask)
        bits *= salt
        capacity = capacities[bucket]
        rows = _rows(addresses[bucket], capacity)
        tags = _tags(addresses[bucket], capacity)
        place = _find_from(_place(bits, capacity), ids[i], _tag(bits), rows, tags, keys)
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
        rows = _rows(addresses[bucket], capacity)
        place = _place_of(bits, count, rows, _tags(addresses[bucket], capacity))
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
