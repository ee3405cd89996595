"""The rows of tables that a fake shard holds, trained by plain SGD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ps_protocol.model.ids import buckets_of
from ps_protocol.model.layout import Layout
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.convert.options import row_options_from_pb

Rows = dict[int, np.ndarray]
"""By id."""


def first_row(row: int, dim: int) -> np.ndarray:
    """What a fake table's row begins with."""
    return np.sin(np.arange(1, dim + 1) * (row % 1000 + 1)).astype(np.float32)


class FakeTables:
    """Rows of all tables of one shard; an id of another shard fails the test."""

    def __init__(self, layout: Layout, learning_rates: dict[int, float]) -> None:
        """``learning_rates`` are the newest by table, where a worker has sent one; they outlive a change of layout."""
        self._map = layout.shard_map
        self._shard = layout.shard
        self._learning_rates = learning_rates
        self.rows: list[Rows] = [{} for _ in self._map.spec.tables]

    def dim(self, table: int) -> int:
        return self._map.spec.tables[table].dim

    def read(self, wanted: Sequence[tuple[int, int]]) -> bytes:
        """Of tables and ids, in this order."""
        for table, row in wanted:
            assert self._owns(table, row)
        return b"".join(self._row(table, row).tobytes() for table, row in wanted)

    def fill(self, tables: Sequence[Mapping[int, np.ndarray]]) -> None:
        """Take of all rows of the job those that are here."""
        for number, table in enumerate(tables):
            self.rows[number] = {row: value.copy() for row, value in table.items() if self._owns(number, row)}

    def load(self, header: pb.LoadRowsHeader, payload: bytes) -> None:
        ids = np.frombuffer(payload, np.int64, header.rows)
        rows = np.frombuffer(payload, np.float32, offset=ids.nbytes).reshape(header.rows, -1)
        for row, values in zip(ids.tolist(), rows, strict=True):
            assert self._owns(header.table, row)
            self.rows[header.table].setdefault(row, values)

    def payload_bytes(self, header: pb.PushHeader) -> int:
        return sum(each.rows * (8 + 4 * self.dim(each.table)) for each in header.tables)

    def apply(self, header: pb.PushHeader, payload: bytes) -> None:
        for number, options in enumerate(header.table_arguments):
            declared = self._map.spec.tables[number].options
            self._learning_rates[number] = {**declared, **row_options_from_pb(options)}["lr"]
        ids, at = [], 0
        for each in header.tables:
            ids.append(np.frombuffer(payload, np.int64, each.rows, at).tolist())
            at += 8 * each.rows
        for each, own in zip(header.tables, ids, strict=True):
            assert len(set(own)) == len(own)
            lr = self._learning_rates.get(each.table, self._map.spec.tables[each.table].options["lr"])
            for row in own:
                assert self._owns(each.table, row)
                gradient = np.frombuffer(payload, np.float32, self.dim(each.table), at)
                at += gradient.nbytes
                self.rows[each.table][row] = self._row(each.table, row) - np.float32(lr) * gradient
        assert at == len(payload)

    def _row(self, table: int, row: int) -> np.ndarray:
        return self.rows[table].get(row, first_row(row, self.dim(table)))

    def _owns(self, table: int, row: int) -> bool:
        owners = self._map.tables[table]
        bucket = buckets_of(np.array([row], np.int64), len(owners))[0]
        return owners[bucket] == self._shard
