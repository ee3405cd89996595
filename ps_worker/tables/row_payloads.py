"""What goes to each shard of rows: the gradients of one step, and first values; and which shard a row is on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ps_protocol.model.spec import ShardMap
from ps_protocol.model.tables import RowCount
from ps_worker.tables.compiled import Ids, Rows, merge_rows, split


class RowRouter:
    """Which shard each row is on, by one shard map. Immutable; replaced when buckets have moved."""

    def __init__(self, shard_map: ShardMap) -> None:
        self.shard_map = shard_map
        self._owners = [np.array(owners, np.int32) for owners in shard_map.tables]
        #: The shard that has all of a table; -1: several shards have it.
        self._sole = [owners[0] if len(set(owners)) == 1 else -1 for owners in shard_map.tables]

    def split(self, table: int, ids: Ids) -> Iterator[tuple[int, Ids | None]]:
        """Yield the shards that ``ids`` are on, each with the indexes of its ids, in order; None: all of them."""
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


@dataclass(frozen=True, slots=True)
class TableGradients:
    """Gradients of one table: distinct ids, int64 [n], and float32 [n, dim]."""

    table: int
    ids: Ids
    gradients: Rows

    def is_finite(self) -> bool:
        """Return whether there is no NaN or infinity."""
        values = torch.from_numpy(self.gradients)
        # The sum of large finite values may overflow.
        return math.isfinite(values.sum().item()) or bool(values.isfinite().all())

    @property
    def nbytes(self) -> int:
        """Of the ids and the gradients."""
        return self.ids.nbytes + self.gradients.nbytes

    def squared_norm(self) -> float:
        """Return the sum of squares."""
        norm = float(torch.linalg.vector_norm(torch.from_numpy(self.gradients)))
        return norm * norm


def joined_gradients(
    workers: Sequence[Sequence[TableGradients]], weights: Sequence[float] | None
) -> list[TableGradients]:
    """The mean over ``workers``, each with the gradients of its tables, as a shard takes it over their pushes.

    ``weights``: shares of the mean, one for each worker; None: equal ones. Sums are taken in the order given.
    """
    found = []
    for number in sorted({each.table for tables in workers for each in tables}):
        parts = [(each, at) for at, tables in enumerate(workers) for each in tables if each.table == number]
        own = None if weights is None else [weights[at] for _, at in parts]
        ids, gradients = merge_rows([(each.ids, each.gradients) for each, _ in parts], len(workers), own)
        found.append(TableGradients(number, ids, gradients))
    return found


@dataclass(frozen=True, slots=True)
class RowPayload:
    """The part of one shard: its header entries, and the bytes of all ids and then of all gradients."""

    tables: Sequence[RowCount] = ()
    pieces: Sequence[memoryview] = ()


NO_ROWS = RowPayload()


@dataclass(slots=True)
class RowUpdate:
    """The row gradients of one step; must not change until the step is over. Used by one thread at a time.

    A repeated push has the same bytes. After buckets have moved, the update is split again.
    """

    tables: Sequence[TableGradients]
    _router: RowRouter | None = field(default=None, init=False)
    _payloads: dict[int, RowPayload] = field(default_factory=dict, init=False)

    def of(self, router: RowRouter, shard: int) -> RowPayload:
        """Return the part of ``shard``. It names every table, also those without a row there."""
        if self._router is not router:
            self._router, self._payloads = router, self._split(router)
        return self._payloads.get(shard) or RowPayload([RowCount(each.table, 0) for each in self.tables])

    def _split(self, router: RowRouter) -> dict[int, RowPayload]:
        ids: dict[int, list[Ids]] = {}
        gradients: dict[int, list[Rows]] = {}
        counts: dict[int, dict[int, int]] = {}
        for each in self.tables:
            for shard, indexes in router.split(each.table, each.ids):
                whole = indexes is None
                ids.setdefault(shard, []).append(each.ids if whole else each.ids[indexes])
                gradients.setdefault(shard, []).append(each.gradients if whole else each.gradients[indexes])
                counts.setdefault(shard, {})[each.table] = len(ids[shard][-1])
        return {
            shard: RowPayload(
                [RowCount(each.table, counts[shard].get(each.table, 0)) for each in self.tables],
                [*map(array_bytes, ids[shard]), *map(array_bytes, gradients[shard])],
            )
            for shard in ids
        }


def array_bytes(array: Ids | Rows) -> memoryview:
    """Return the bytes of a contiguous array."""
    return memoryview(array.reshape(-1).view(np.uint8).data)


_CALL_ROWS = 100_000

#: By number of the table: values of the rows 0, 1, …, float32 [n, dim].
InitialRows = Mapping[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class RowsCall:
    """One upload of first values to one shard; the shard keeps rows that it has already."""

    shard: int
    table: int
    rows: int
    #: The bytes of all ids, then of all rows.
    pieces: tuple[memoryview, memoryview]


def uploads(initial: InitialRows, router: RowRouter) -> Iterator[RowsCall]:
    """Yield the calls that upload first values, one at a time."""
    for table, values in initial.items():
        for begin in range(0, len(values), _CALL_ROWS):
            piece = np.ascontiguousarray(values[begin : begin + _CALL_ROWS].detach().cpu().numpy(), np.float32)
            ids = np.arange(begin, begin + len(piece), dtype=np.int64)
            for shard, indexes in router.split(table, ids):
                part = (ids, piece) if indexes is None else (ids[indexes], piece[indexes])
                yield RowsCall(shard, table, len(part[0]), (array_bytes(part[0]), array_bytes(part[1])))
