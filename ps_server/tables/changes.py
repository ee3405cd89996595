"""The numbered deletions of rows and replacements of buckets of a table, for readers of its changes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ps_protocol.model.ids import buckets_of
from ps_protocol.model.tables import Ids
from ps_server.tables.arrays import zeroed

#: The number of changes that are kept; a reader that is further behind starts from the beginning.
KEPT_CHANGES = 1 << 20


class Changes:
    """Numbers the deletions and arrivals of one table, from 1. Its ShardTable owns it; the executor uses it."""

    def __init__(self, buckets: int) -> None:
        #: Of the newest change.
        self.number = 0
        #: Of each bucket: its number when what it holds was last written from outside; 0: never. int64 [buckets]
        self.arrived: npt.NDArray[np.int64] = np.zeros(buckets, np.int64)
        self._ids = zeroed(8 * KEPT_CHANGES).view(np.int64)
        self._deleted = zeroed(KEPT_CHANGES).view(np.bool_)

    def delete(self, ids: Ids) -> None:
        """Rows were removed."""
        kept = ids[-KEPT_CHANGES:]
        places = (self.number + np.arange(1 + ids.size - kept.size, 1 + ids.size)) % KEPT_CHANGES
        self._ids[places] = kept
        self._deleted[places] = True
        self.number += ids.size

    def arrive(self, buckets: Iterable[int]) -> None:
        """The contents of buckets were replaced, other than by updates and deletions."""
        for bucket in buckets:
            self.number += 1
            self._deleted[self.number % KEPT_CHANGES] = False
            self.arrived[bucket] = self.number

    def deletions_since(self, number: int) -> Ids | None:
        """Ids removed after change ``number``, in order; None when these are no longer kept."""
        found = self._deletions(number)
        return None if found is None else found[0]

    def _deletions(self, since: int) -> tuple[Ids, npt.NDArray[np.int64]] | None:
        if self.number - since > KEPT_CHANGES:
            return None
        numbers = np.arange(since + 1, self.number + 1)
        numbers = numbers[self._deleted[numbers % KEPT_CHANGES]]
        return self._ids[numbers % KEPT_CHANGES], numbers


class DeletedIds:
    """The deletions of one table by bucket, for who asks for one bucket after another while there are more."""

    def __init__(self, changes: Changes, since: int) -> None:
        """``since``: a change; earlier ones are not asked for."""
        self._changes = changes
        self._read = since
        #: Ids by bucket, their changes, and where the ids of each bucket begin.
        self._parts: list[tuple[Ids, npt.NDArray[np.int64], npt.NDArray[np.int64]]] | None = []

    def of(self, bucket: int, since: int) -> Ids | None:
        """Ids of ``bucket`` that were removed after change ``since``, each once, rising; None when that is not known
        any more.
        """
        if self._parts is not None and self._changes.number > self._read:
            self._go_on(self._parts)
        if self._parts is None:
            return None
        found = [np.empty(0, np.int64)]
        for ids, numbers, begins in self._parts:
            piece = slice(begins[bucket], begins[bucket + 1])
            found.append(ids[piece][numbers[piece] > since])
        return np.unique(np.concatenate(found))

    def _go_on(self, parts: list[tuple[Ids, npt.NDArray[np.int64], npt.NDArray[np.int64]]]) -> None:
        found = self._changes._deletions(self._read)
        self._read = self._changes.number
        if found is None:
            self._parts = None
            return
        ids, numbers = found
        if ids.size:
            buckets = buckets_of(ids, self._changes.arrived.size)
            order = np.argsort(buckets, kind="stable")
            counts = np.bincount(buckets, minlength=self._changes.arrived.size)
            parts.append((ids[order], numbers[order], np.concatenate(([0], np.cumsum(counts)))))
