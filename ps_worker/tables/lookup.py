"""Rows that are wanted of some tables, split over the shards that have them, and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ps_protocol.errors import ModelMoved, PsError
from ps_protocol.v1 import shard_pb2 as pb
from ps_worker.tables.compiled import Ids, Rows, put_rows
from ps_worker.tables.places import RowPlaces
from ps_worker.tables.update import array_bytes

#: (phase, clock) of a push.
Position = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Rows of one table: int64 [n], and where they go, float32 [n, dim]."""

    table: int
    ids: Ids
    rows: Rows


@dataclass(slots=True)
class Part:
    """What one shard is asked for. Filled by whoever receives; ``arrived`` is set when that is done."""

    tables: list[pb.TableRows] = field(default_factory=list)
    ids: list[memoryview] = field(default_factory=list)
    #: Where its answer goes, in the order of ``tables``.
    pieces: list[memoryview] = field(default_factory=list)
    #: Rows that have to be put in place afterwards: the target, the places in it, and what arrives.
    scattered: list[tuple[Rows, Ids, Rows]] = field(default_factory=list)
    arrived: bool = False
    error: PsError | None = None


class Lookup:
    """One question to all shards about several tables. Used by one thread at a time, mostly the training thread."""

    def __init__(self, wanted: Sequence[Wanted], position: Position, *, now: bool = False) -> None:
        """``position``: the push that the rows are for. ``now``: as they are, whatever the mode."""
        # In the order of tables, as messages name them.
        self._wanted = sorted(wanted, key=lambda each: each.table)
        self.position = position
        self.now = now
        self._places: RowPlaces | None = None
        #: By shard.
        self.parts: dict[int, Part] = {}
        self._settled = False

    @property
    def rows(self) -> int:
        """How many rows are wanted."""
        return sum(len(each.ids) for each in self._wanted)

    @property
    def arrived(self) -> bool:
        """Whether every shard has answered, and none that its rows are elsewhere."""
        parts = self.parts.values()
        return self._places is not None and all(p.arrived and not isinstance(p.error, ModelMoved) for p in parts)

    def lay_out(self, places: RowPlaces) -> None:
        """Split it by ``places``; after buckets have moved, what has not arrived whole is asked for anew."""
        if self._places is places or self.arrived:
            return
        self._places, self.parts = places, {}
        for each in self._wanted:
            for shard, indexes in places.split(each.table, each.ids):
                part = self.parts.setdefault(shard, Part())
                ids = each.ids if indexes is None else each.ids[indexes]
                if not part.tables or part.tables[-1].table != each.table:
                    part.tables.append(pb.TableRows(table=each.table))
                part.tables[-1].rows += len(ids)
                part.ids.append(array_bytes(ids))
                target = each.rows
                if indexes is not None:
                    target = np.empty((len(ids), each.rows.shape[1]), np.float32)
                    part.scattered.append((each.rows, indexes, target))
                part.pieces.append(array_bytes(target))

    def settle(self) -> None:
        """Put the rows that have arrived where they were wanted. Raises what a shard answered instead."""
        errors = [part.error for part in self.parts.values() if part.error is not None]
        if errors:
            raise errors[0]
        if not self._settled:
            for part in self.parts.values():
                for target, places, rows in part.scattered:
                    put_rows(target, places, rows)
            self._settled = True
