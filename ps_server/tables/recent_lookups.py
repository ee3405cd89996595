"""The rows that were found last: a worker pushes to the rows that it has pulled, and they need not be found again."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from ps_protocol.model.tables import Ids

#: Lookups that are kept, for as many workers; and the most ids of one.
_KEPT = 4
_MOST_IDS = 1 << 17


class RecentLookups:
    """Part of one RowStore. Rows keep their numbers until one is removed, which has to ``forget`` all."""

    def __init__(self) -> None:
        self._kept: deque[tuple[Ids, npt.NDArray[np.int64]]] = deque(maxlen=_KEPT)

    def keep(self, ids: Ids, found: npt.NDArray[np.int64]) -> None:
        """``found``: the row of each of ``ids``, all of which have one; not written from now on."""
        if 0 < ids.size <= _MOST_IDS:
            self._kept.append((ids.copy(), found))

    def rows_of(self, ids: Ids) -> npt.NDArray[np.int64] | None:
        """The row of each id, to be read only, where these very ids were looked up; they are not kept any longer."""
        for place, (known, found) in enumerate(self._kept):
            if known.size == ids.size and known[0] == ids[0] and np.array_equal(known, ids):
                del self._kept[place]
                return found
        return None

    def forget(self) -> None:
        """Rows are removed: others get their numbers."""
        self._kept.clear()
