"""What snapshots have of a table, and the copies that the next one needs: of each bucket what has changed since."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ps_protocol.model.tables import Ids
from ps_server.tables.bucket_contents import BucketChanges, BucketContents
from ps_server.tables.changes import Changes, DeletedIds

if TYPE_CHECKING:
    from ps_server.tables.table import ShardTable

_NO_IDS: Ids = np.empty(0, np.int64)


class SavedBuckets:
    """What a snapshot has of the buckets of one table: up to which update, and which deletion. int64 [buckets] each."""

    def __init__(self, buckets: int, place: Any = ()) -> None:
        """``place``: where it is, for who writes snapshots."""
        self.place = place
        #: -1: nothing.
        self.updates = np.full(buckets, -1, np.int64)
        self.changes = np.zeros(buckets, np.int64)
        self.waiting_changes = np.zeros(buckets, np.int64)

    def note(self, table: ShardTable, bucket: int, updates: int) -> None:
        """It has this bucket up to ``updates`` and what was deleted until now."""
        self.updates[bucket] = updates
        self.changes[bucket], self.waiting_changes[bucket] = table.changes, table.waiting_changes


class TableSave:
    """Copies the buckets of one table for a snapshot, one after another, in the executor."""

    def __init__(
        self, table: ShardTable, since: SavedBuckets | None, changes: Changes, dropped: Changes | None
    ) -> None:
        self._table = table
        self._since = since
        #: What the snapshot has.
        self.saved = SavedBuckets(table.spec.buckets)
        if since is not None:
            here = since.updates >= 0
            self._deleted = DeletedIds(changes, int(since.changes[here].min(initial=changes.number)))
            first = int(since.waiting_changes[here].min(initial=dropped.number if dropped else 0))
            self._dropped = DeletedIds(dropped, first) if dropped else None

    def copy(self, bucket: int) -> BucketContents | BucketChanges:
        """What has changed in a bucket; all of it where that is not known, or is more."""
        changes = self._changes(bucket)
        found = self._table.contents(bucket) if changes is None else changes
        self.saved.note(self._table, bucket, self._table.updates)
        return found

    def end(self, place: Any) -> None:
        """The snapshot is whole; what it has is at ``place``."""
        self.saved.place = place
        self._table.saved = self.saved

    def _changes(self, bucket: int) -> BucketChanges | None:
        since, table = self._since, self._table
        if since is None or since.updates[bucket] < 0 or table.arrived[bucket] > since.changes[bucket]:
            return None
        deleted = self._deleted.of(bucket, int(since.changes[bucket]))
        dropped = self._dropped.of(bucket, int(since.waiting_changes[bucket])) if self._dropped else _NO_IDS
        if deleted is None or dropped is None:
            return None
        return BucketChanges(table.contents(bucket, int(since.updates[bucket])), deleted, dropped)
