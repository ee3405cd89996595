"""Cuts the first values of tables' rows into calls that upload them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ps_worker.tables.row_router import RowRouter
from ps_worker.tables.update import array_bytes

_CALL_ROWS = 100_000

#: By number of the table: values of the rows 0, 1, …, float32 [n, dim].
InitialRows = Mapping[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class RowsCall:
    """One upload to one shard, which keeps rows that it has already."""

    shard: int
    table: int
    rows: int
    #: The bytes of all ids, then of all rows.
    pieces: tuple[memoryview, memoryview]


def uploads(initial: InitialRows, router: RowRouter) -> Iterator[RowsCall]:
    """All calls, one at a time."""
    for table, values in initial.items():
        for begin in range(0, len(values), _CALL_ROWS):
            piece = np.ascontiguousarray(values[begin : begin + _CALL_ROWS].detach().cpu().numpy(), np.float32)
            ids = np.arange(begin, begin + len(piece), dtype=np.int64)
            for shard, indexes in router.split(table, ids):
                part = (ids, piece) if indexes is None else (ids[indexes], piece[indexes])
                yield RowsCall(shard, table, len(part[0]), (array_bytes(part[0]), array_bytes(part[1])))
