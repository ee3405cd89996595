"""The ids of a table that were used and have no row yet, where an id is admitted after several uses."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ps_protocol.model.ids import unique
from ps_protocol.model.tables import Eviction, Ids
from ps_server.tables.changes import Changes
from ps_server.tables.retention import Sweep
from ps_server.tables.store import Columns, RowStore

Uses = npt.NDArray[np.uint32]


class WaitingIds:
    """The waiting ids of one ShardTable, which calls it in the executor."""

    def __init__(self, buckets: int) -> None:
        self._store = RowStore(buckets, 0, with_uses=True)
        self._sweep = Sweep(self._store, Eviction.LRU)
        #: Ids that were dropped. An id that gets a row is not among them.
        self.dropped = Changes(buckets)

    def __len__(self) -> int:
        return self._store.count

    @property
    def size_bytes(self) -> int:
        """Bytes of ids and maps."""
        return self._store.size_bytes

    def uses_of(self, ids: Ids) -> Uses:
        """How often each id was used while it waits."""
        return self._uses(ids)[0]

    def use(self, ids: Ids, update: int) -> None:
        """Count one use of each id."""
        self._store.touch(self._store.insert(ids, update), update)

    def admit(self, ids: Ids) -> Uses:
        """Remove those of ``ids`` that wait; returns the uses of each, 0 for those that do not."""
        uses, known = self._uses(ids)
        self._store.remove(ids[known])
        return uses

    def drop(self, ids: Ids) -> None:
        """Remove those of ``ids`` that wait, and remember that."""
        ids = unique(ids)[0]
        ids = ids[self._store.find(ids) >= 0]
        self._store.remove(ids)
        self.dropped.delete(ids)

    def to_drop(self, through: int, most: int, keep: Ids) -> Ids:
        """Ids to drop: those last used in update ``through`` or before, else the surplus over ``most``, unless ``most``
        is 0.
        """
        kept = self._store.find(keep)
        kept = kept[kept >= 0]
        rows = self._sweep.expired(through, kept)
        if not rows.size and most:
            rows = self._sweep.evicted(most, kept)
        return self._store.ids[rows]

    def copy(self, bucket: int, since: int = -1) -> Columns:
        """The ids of one bucket used after update ``since``."""
        return self._store.copy(self._store.of_bucket(bucket, since))

    def put(self, ids: Ids, touched: npt.NDArray[np.int64], uses: Uses, gone: Ids) -> None:
        """Remove those of ``gone`` that wait, and write these, whether they wait or not; nothing is remembered."""
        self.admit(unique(np.concatenate((gone, ids)))[0])
        self.write(ids, touched, uses)

    def write(self, ids: Ids, touched: npt.NDArray[np.int64], uses: Uses) -> None:
        """Add ids that do not wait yet."""
        self._store.write(Columns(ids, touched, np.empty((ids.size, 0), np.float32), uses))

    def forget(self, bucket: int) -> None:
        """Remove the ids of one bucket; nothing is remembered of that."""
        self._store.remove(self._store.ids[self._store.of_bucket(bucket)])

    def view(self) -> Columns:
        """All ids, not copied: valid until the next change."""
        return self._store.view()

    def _uses(self, ids: Ids) -> tuple[Uses, npt.NDArray[np.bool_]]:
        found = self._store.find(ids)
        known = found >= 0
        uses = np.zeros(ids.size, np.uint32)
        uses[known] = self._store.uses[found[known]]
        return uses, known
