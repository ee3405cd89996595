"""Rows that a worker lends: what was checked of them is what is used."""

from __future__ import annotations

import numpy as np

from ps_protocol.layout import Layout
from ps_protocol.v1 import shard_pb2 as pb
from ps_server import tables as row_tables
from ps_server.shard.pushed_rows import announced, combined_rows, inspect
from tests.support.tables import spec_with, table_spec, whole_table_map

ROWS, DIM = 300, 4


def test_ids_that_a_worker_changes_after_they_were_checked_find_no_row():
    layout = Layout.of(whole_table_map(spec_with(table_spec(dim=DIM, buckets=2))), 0)
    room = memoryview(bytearray(8 * ROWS + 4 * ROWS * DIM))
    table = row_tables.Table(layout.shard_map.spec.tables[0], range(2))
    shown = np.frombuffer(room, np.int64, ROWS)
    shown[:] = np.arange(ROWS)
    pushed = announced([pb.TableRows(table=0, rows=ROWS)], layout, [table.spec.options], lambda size: room[:size])
    assert inspect(pushed, [table], layout, finite=False) is None
    shown[:] = 1 << 40
    (step,) = combined_rows([pushed], [table], 1)
    table.apply(step)
    assert table.rows == ROWS
    assert sorted(int(id_) for bucket in range(2) for id_ in table.ids_of(bucket)) == list(range(ROWS))
    assert np.shares_memory(step.gradients, np.frombuffer(room, np.uint8)), "gradients are not copied"
