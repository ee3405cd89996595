"""What was found last: a worker pushes to the rows that it has pulled, and they need not be found again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ps_protocol.model.tables import Ids

#: Lookups that are kept, for as many workers; and the most ids of one.
_KEPT = 4
_MOST_IDS = 1 << 17


@dataclass(slots=True, eq=False)
class RecentLookup:
    """Ids that were looked up, and what is known of them."""

    ids: Ids
    #: The row of each; None where some had none.
    found: npt.NDArray[np.int64] | None
    missing: int
    #: No id comes twice; None: not known yet.
    distinct: bool | None = None
    #: Maps that are to grow before its ids are inserted, and rows of each then; None: not known yet.
    growing: list[tuple[int, int]] | None = None


class RecentLookups:
    """Part of one RowStore. Rows keep their numbers until one is removed, which has to ``forget`` all."""

    def __init__(self) -> None:
        self._kept: deque[RecentLookup] = deque(maxlen=_KEPT)

    def keep(self, ids: Ids, found: npt.NDArray[np.int64], missing: int) -> None:
        """``found``: the row of each of ``ids``, -1 for so many ``missing`` ones; not written from now on."""
        if 0 < ids.size <= _MOST_IDS:
            self._kept.append(RecentLookup(ids.copy(), None if missing else found, missing))

    def take(self, ids: Ids) -> npt.NDArray[np.int64] | None:
        """The row of each id, to be read only, where these very ids were looked up and had one.

        They are not kept any longer.
        """
        if (known := self.of(ids)) is None:
            return None
        self._kept.remove(known)
        return known.found

    def forget(self) -> None:
        """Rows are removed: others get their numbers."""
        self._kept.clear()

    def of(self, ids: Ids) -> RecentLookup | None:
        """That of these very ids."""
        for known in self._kept:
            if known.ids.size == ids.size and known.ids[0] == ids[0] and np.array_equal(known.ids, ids):
                return known
        return None
