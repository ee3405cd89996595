"""Finds the shards of rows, by one shard map."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ps_protocol.model.spec import ShardMap
from ps_worker.tables.compiled import Ids, split


class RowRouter:
    """Immutable; replaced when buckets have moved."""

    def __init__(self, shard_map: ShardMap) -> None:
        self.shard_map = shard_map
        self._owners = [np.array(owners, np.int32) for owners in shard_map.tables]
        #: The shard that has all of a table; -1: several shards have it.
        self._sole = [owners[0] if len(set(owners)) == 1 else -1 for owners in shard_map.tables]

    def split(self, table: int, ids: Ids) -> Iterator[tuple[int, Ids | None]]:
        """The shards that ``ids`` are on, each with the indexes of its own, in order; None: all of them."""
        if self._sole[table] >= 0:
            if ids.size:
                yield self._sole[table], None
            return
        order, counts = split(ids, self._owners[table], self.shard_map.shards)
        end = 0
        for shard, count in enumerate(counts.tolist()):
            begin, end = end, end + count
            if count == ids.size and count:
                yield shard, None
            elif count:
                yield shard, order[begin:end]
