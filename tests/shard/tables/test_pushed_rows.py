"""Rows that a worker lends: what was checked of them is what is used."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch

from ps_protocol.model.layout import Layout
from ps_protocol.model.tables import RowCount
from ps_server import tables as row_tables
from ps_server.consistency import Position, PushInfo, WorkerKey
from ps_server.shard.execution.executor import ShardExecutor
from ps_server.shard.step.applier import combined
from ps_server.shard.step.push import IncomingPush, must_skip
from ps_server.shard.step.pushed_rows import announced, combined_rows, inspect
from ps_server.state.region import Region, RegionPool
from tests.support.tables import spec_with, table_spec, whole_table_map

ROWS, DIM = 300, 4


def test_ids_that_a_worker_changes_after_they_were_checked_find_no_row():
    layout = Layout.of(whole_table_map(spec_with(table_spec(dim=DIM, buckets=2))), 0)
    room = memoryview(bytearray(8 * ROWS + 4 * ROWS * DIM))
    table = row_tables.ShardTable(layout.shard_map.spec.tables[0], range(2))
    shown = np.frombuffer(room, np.int64, ROWS)
    shown[:] = np.arange(ROWS)
    pushed = announced([RowCount(0, ROWS)], layout, [table.spec.options], lambda size: room[:size])
    assert inspect(pushed, [table], layout, finite=False) is None
    shown[:] = 1 << 40
    (step,) = combined_rows([pushed], [table], 1)
    table.apply(step)
    assert table.rows == ROWS
    assert sorted(int(id_) for bucket in range(2) for id_ in table.ids_of(bucket)) == list(range(ROWS))
    assert np.shares_memory(step.gradients, np.frombuffer(room, np.uint8)), "gradients are not copied"
    (kept,) = combined_rows([pushed], [table], 1, keep=True)
    assert np.array_equal(kept.gradients, step.gradients)
    assert not np.shares_memory(kept.gradients, np.frombuffer(room, np.uint8)), "unless they are written down"


@pytest.mark.parametrize("lent", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_gradients_that_are_written_down_lie_where_no_worker_can_change_them(lent, keep):
    layout = Layout.of(whole_table_map(spec_with(table_spec(dim=DIM))), 0)
    pool, region = RegionPool(layout), Region(layout)
    region.data.fill_(1)
    info = PushInfo(WorkerKey(0, 1), 1, Position(0, 1), 0)
    push = IncomingPush(info, region, frozenset(), [{}], lent=lent)
    step, taken = combined([push], 1.0, 1, pool, [], keep=keep)
    assert (step.gradients is region) == (not (lent and keep))
    assert torch.equal(step.gradients.data, region.data)
    assert taken is (step.gradients if lent and keep else None)
    assert pool.in_use == int(lent and keep)


@pytest.mark.parametrize(
    ("rows", "finite", "on_loop"), [(14_000, True, True), (14_000, False, False), (20_000, True, False)]
)
def test_a_short_look_at_ids_is_taken_on_the_event_loop(monkeypatch, rows, finite, on_loop):
    layout = Layout.of(whole_table_map(spec_with(table_spec(dim=DIM))), 0)
    table = row_tables.ShardTable(layout.shard_map.spec.tables[0], range(layout.shard_map.spec.tables[0].buckets))
    pushed = announced([RowCount(0, rows)], layout, [table.spec.options])
    pushed.parts[0].ids[:] = np.arange(rows)
    pushed.parts[0].gradients[:] = 0
    checked_by = []
    monkeypatch.setattr(table, "check_here", lambda ids: checked_by.append(threading.current_thread()))
    info = PushInfo(WorkerKey(0, 1), 1, Position(0, 1), 0)
    push = IncomingPush(info, Region(layout), frozenset(), [], finite=finite, rows=pushed)

    async def scenario():
        executor = ShardExecutor(1)
        try:
            return await must_skip(push, executor, [table])
        finally:
            executor.close()

    assert not asyncio.run(scenario())
    assert [thread is threading.main_thread() for thread in checked_by] == [on_loop]
