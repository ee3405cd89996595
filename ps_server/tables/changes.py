"""The numbered deletions of rows and replacements of buckets of a table, for readers of its changes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

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
        if self.number - number > KEPT_CHANGES:
            return None
        places = np.arange(number + 1, self.number + 1) % KEPT_CHANGES
        return self._ids[places[self._deleted[places]]]
