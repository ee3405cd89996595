"""Compiled functions of ids that worker and shard share: the bucket of an id, and the distinct ids of a batch.

Imports numba: only what handles rows imports this module.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ps_protocol.model.kernels import kernel
from ps_protocol.model.tables import Ids

_EMPTY = -1
#: Places of the table per id, at least: in a table that is fuller, searches are longer and harder to foresee.
_ROOM = 4
#: Places looked at per id, beyond which ids are no accident: a table a quarter full needs one or two.
_PROBES = 64
#: int64 [n]; memory that may only be read will do.
_IDS = "Array(int64, 1, 'C', readonly=True)"


@kernel("uint64(int64)", inline="always")
def mix(value: Any) -> Any:
    """64 well mixed bits of an id: the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).

    The low bits choose the bucket, the high ones the place within it.
    """
    bits = np.uint64(value) + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@kernel(f"int32[::1]({_IDS}, int64)", allocates=True)
def buckets_of(ids: Any, buckets: Any) -> Any:
    """The bucket of each id; ``buckets`` is a power of two. int32 [n]."""
    found = np.empty(ids.size, np.int32)
    mask = np.uint64(buckets - 1)
    for i in range(ids.size):
        found[i] = np.int32(mix(ids[i]) & mask)
    return found


@kernel(f"Tuple((int64[::1], int64[::1]))({_IDS})", allocates=True)
def _unique(ids: Any) -> Any:
    """As ``unique``; nothing of both where ids collide as only chosen ones do."""
    size = 16
    while size < _ROOM * ids.size:
        size *= 2
    mask = np.uint64(size - 1)
    places = np.full(size, _EMPTY, np.int32)
    found = np.empty(ids.size, np.int64)
    inverse = np.empty(ids.size, np.int64)
    count = 0
    left = _PROBES * (ids.size + 16)
    for i in range(ids.size):
        wanted = ids[i]
        slot = (mix(wanted) >> np.uint64(20)) & mask
        place = places[slot]
        while place != _EMPTY and found[place] != wanted:
            slot = (slot + np.uint64(1)) & mask
            place = places[slot]
            left -= 1
            if left < 0:
                return found[:0].copy(), inverse[:0].copy()
        if place == _EMPTY:
            place = np.int32(count)
            places[slot] = place
            found[count] = wanted
            count += 1
        inverse[i] = place
    return found[:count].copy(), inverse


def unique(ids: Ids) -> tuple[Ids, Ids]:
    """Each id once, in order of appearance, and for each id of the batch its index among them. int64 [u], int64 [n].

    Takes time in proportion to their number, also for ids chosen to collide: those are sorted instead.
    """
    found, inverse = _unique(ids)
    if inverse.size == ids.size:
        return found, inverse
    values, first, sorted_places = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty(order.size, np.int64)
    place[order] = np.arange(order.size)
    return values[order], place[sorted_places]


@kernel(f"Tuple((int64[::1], int64[::1]))({_IDS}, int32[::1], int64)", allocates=True)
def split(ids: Any, shard_of_bucket: Any, shards: Any) -> Any:
    """Where ids go: their indexes ordered by shard, within a shard as they came, and how many each gets.

    int64 [n], int64 [shards].
    """
    mask = np.uint64(shard_of_bucket.size - 1)
    counts = np.zeros(shards, np.int64)
    owner = np.empty(ids.size, np.int32)
    for i in range(ids.size):
        owner[i] = shard_of_bucket[mix(ids[i]) & mask]
        counts[owner[i]] += 1
    place = np.zeros(shards, np.int64)
    for shard in range(1, shards):
        place[shard] = place[shard - 1] + counts[shard - 1]
    order = np.empty(ids.size, np.int64)
    for i in range(ids.size):
        order[place[owner[i]]] = i
        place[owner[i]] += 1
    return order, counts
