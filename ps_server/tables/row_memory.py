"""How much memory the rows of a shard's tables may take together, and where the others are. No compiled code."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ps_protocol.errors import DamagedData

if TYPE_CHECKING:
    from ps_server.tables.paged_rows import PagedRows

FEWEST_ROWS = 4
"""A table has memory for so many rows, whatever the limit."""

SEGMENT_BYTES = 1 << 20
"""Records are written, and a part of a file is emptied, this much at a time."""


def _ignore(error: DamagedData) -> None:
    """The default: who asked for the row has the error."""


@dataclass(eq=False)
class RowMemory:
    """The memory for rows of all tables of one shard. Used by the shard's executor."""

    #: Of rows, ids and maps together; 0: none but those of tables.
    limit_bytes: int = 0
    #: Where the others are.
    folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    shard: int = 0
    segment_bytes: int = SEGMENT_BYTES
    #: Told that a row on disk is not what was written, before who asked for it has the error. In any thread.
    on_damage: Callable[[DamagedData], None] = _ignore
    _tables: weakref.WeakSet[PagedRows] = field(default_factory=weakref.WeakSet)

    def add(self, rows: PagedRows) -> None:
        """One more table."""
        self._tables.add(rows)

    def most_rows(self, of: PagedRows) -> int:
        """How many of its rows a table may have in memory: what the ids and maps of all leave is divided evenly, and
        what one does not need is the others'. A table with a limit of its own has no more than that.
        """
        if not self.limit_bytes:
            return rows_within(of.limit_bytes - of.index_bytes, of.slot_bytes)
        if len(self._tables) == 1:
            limit = min(self.limit_bytes, of.limit_bytes or self.limit_bytes)
            return rows_within(limit - of.index_bytes, of.slot_bytes)
        left = self.limit_bytes - sum(each.index_bytes for each in self._tables)
        wanted = sorted(each.wanted_bytes for each in self._tables)
        share = 0
        for number, need in enumerate(wanted):
            share = left // (len(wanted) - number)
            if need > share:
                break
            left -= need
        else:
            share = max(share, of.wanted_bytes)
        if of.limit_bytes:
            share = min(share, of.limit_bytes - of.index_bytes)
        return rows_within(share, of.slot_bytes)


def rows_within(left_bytes: int, slot_bytes: int) -> int:
    """How many rows are in memory where ids and maps leave so much, which may be less than nothing."""
    return max(FEWEST_ROWS, left_bytes // slot_bytes)
