"""Cuts the first values of tables' rows into calls that upload them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ps_protocol.v1 import shard_pb2 as pb
from ps_worker.tables.places import RowPlaces
from ps_worker.tables.update import array_bytes

_CALL_ROWS = 100_000

#: By number of the table: values of the rows 0, 1, …, float32 [n, dim].
InitialRows = Mapping[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class RowsCall:
    """One upload to one shard: rows that are there already stay as they are."""

    shard: int
    table: int
    rows: int
    #: The bytes of all ids, then of all rows.
    pieces: tuple[memoryview, memoryview]

    def header(self) -> pb.LoadRowsHeader:
        """As the shard is told."""
        return pb.LoadRowsHeader(table=self.table, rows=self.rows, only_new=True)


def uploads(initial: InitialRows, places: RowPlaces) -> Iterator[RowsCall]:
    """Everything that shards have to be sent, a piece at a time."""
    for table, values in initial.items():
        for begin in range(0, len(values), _CALL_ROWS):
            piece = np.ascontiguousarray(values[begin : begin + _CALL_ROWS].detach().cpu().numpy(), np.float32)
            ids = np.arange(begin, begin + len(piece), dtype=np.int64)
            for shard, indexes in places.split(table, ids):
                part = (ids, piece) if indexes is None else (ids[indexes], piece[indexes])
                yield RowsCall(shard, table, len(part[0]), (array_bytes(part[0]), array_bytes(part[1])))
