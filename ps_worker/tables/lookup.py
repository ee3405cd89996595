"""Lookups of rows: split over the shards that have them, and joined again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ps_protocol.errors import ModelMoved, PsError
from ps_protocol.model.tables import RowCount
from ps_worker.tables.compiled import Ids, Rows, put_rows
from ps_worker.tables.row_payloads import RowRouter, array_bytes

#: (phase, clock) of a push.
Position = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RequestedRows:
    """Ids of one table, int64 [n], and the memory for their rows, float32 [n, dim]."""

    table: int
    ids: Ids
    rows: Rows


@dataclass(slots=True)
class ShardLookup:
    """The part of a lookup on one shard. Its answer fills it and sets ``arrived``."""

    tables: list[RowCount] = field(default_factory=list)
    ids: list[memoryview] = field(default_factory=list)
    #: The memory for the answer, in the order of ``tables``.
    pieces: list[memoryview] = field(default_factory=list)
    #: Rows to copy after the answer: the target, the indexes in it, and the received rows.
    scattered: list[tuple[Rows, Ids, Rows]] = field(default_factory=list)
    arrived: bool = False
    error: PsError | None = None


class Lookup:
    """One lookup in several tables on all shards. Used by one thread at a time, mostly the training thread."""

    def __init__(self, wanted: Sequence[RequestedRows], position: Position, *, now: bool = False) -> None:
        """``position``: the push that the rows are for. ``now``: the present rows, in any mode."""
        # In the order of tables, as messages name them.
        self._wanted = sorted(wanted, key=lambda each: each.table)
        self.position = position
        self.now = now
        self._router: RowRouter | None = None
        #: By shard.
        self.parts: dict[int, ShardLookup] = {}
        self._finished = False
        #: Time of the first request, for a trace; 0: none was sent.
        self.asked_ns = 0

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(len(each.ids) for each in self._wanted)

    @property
    def arrived(self) -> bool:
        """Whether every shard has answered, and no shard that its rows have moved."""
        parts = self.parts.values()
        return self._router is not None and all(p.arrived and not isinstance(p.error, ModelMoved) for p in parts)

    def lay_out(self, router: RowRouter) -> None:
        """Split the lookup by ``router``; after buckets have moved, rows that are not complete are requested again."""
        if self._router is router or self.arrived:
            return
        self._router, self.parts = router, {}
        for each in self._wanted:
            for shard, indexes in router.split(each.table, each.ids):
                part = self.parts.setdefault(shard, ShardLookup())
                ids = each.ids if indexes is None else each.ids[indexes]
                if not part.tables or part.tables[-1].table != each.table:
                    part.tables.append(RowCount(each.table, 0))
                part.tables[-1] = RowCount(each.table, part.tables[-1].rows + len(ids))
                part.ids.append(array_bytes(ids))
                target = each.rows
                if indexes is not None:
                    target = np.empty((len(ids), each.rows.shape[1]), np.float32)
                    part.scattered.append((each.rows, indexes, target))
                part.pieces.append(array_bytes(target))

    def finish(self) -> None:
        """Copy the received rows to their targets. Raises the error that a shard answered instead."""
        errors = [part.error for part in self.parts.values() if part.error is not None]
        if errors:
            raise errors[0]
        if not self._finished:
            for part in self.parts.values():
                for target, places, rows in part.scattered:
                    put_rows(target, places, rows)
            self._finished = True
