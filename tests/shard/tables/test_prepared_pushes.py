"""Rows looked up for a push are prepared for it while its worker computes. Costs 1 s of CPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ps_protocol.v1 import shard_pb2 as pb
from ps_server.shard.step import model_rows
from ps_server.tables import store as store_module
from ps_server.tables.table import ShardTable
from tests.support.shards import TestShard, running_shard, wait_until
from tests.support.tables import RowStream, array, start_with, table_spec

IDS = np.arange(400)
DENSE = bytes(64)


@pytest.fixture
def shard(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestShard]:
    """One that prepares pushes of four rows and more, and enlarges one map at a time."""
    monkeypatch.setattr(model_rows, "PREPARED_BYTES", 64)
    monkeypatch.setattr(store_module, "_MOVED_AT_ONCE", 1)
    with running_shard() as running:
        yield running


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What each piece answered: whether more is left."""
    answers: list[bool] = []
    prepare = ShardTable.prepare

    def noted(table: ShardTable, ids: np.ndarray) -> bool:
        answers.append(prepare(table, ids))
        return answers[-1]

    monkeypatch.setattr(ShardTable, "prepare", noted)
    return answers


def test_a_push_of_rows_that_were_looked_up_is_prepared(shard, pieces):
    model = start_with(shard, table_spec(), table_spec("users", dim=3))
    stream = RowStream(shard)
    stream.ask({0: IDS, 1: IDS[:50]})
    before = stream.rows(1).reshape(-1)[: 4 * IDS.size].reshape(-1, 4)
    wait_until(lambda: pieces.count(False) == 2)
    assert len(pieces) > 10, "two tables, in many pieces"
    assert [table.rows for table in model.tables] == [0, 0]
    assert model.tables[0].has_duplicates(IDS) is False
    gradient = np.ones((IDS.size, 4), np.float32)
    result, _ = stream.exchange_rows(DENSE, {0: (IDS, gradient)})
    assert result.outcome == pb.OUTCOME_APPLIED
    assert np.array_equal(stream.look_up(IDS, 4), before - 0.5 * gradient)


def test_an_id_that_comes_twice_is_refused_all_the_same(shard, pieces):
    start_with(shard, table_spec())
    stream, twice = RowStream(shard), array(*range(10), 9)
    stream.look_up(twice, 4)
    wait_until(lambda: pieces == [False])
    result, _ = stream.exchange_rows(DENSE, {0: (twice, np.ones((11, 4), np.float32))})
    assert result.outcome == pb.OUTCOME_REFUSED
    assert "id twice" in result.error.message


def test_few_rows_and_those_that_nobody_trains_are_not_prepared(shard, pieces):
    start_with(shard, table_spec())
    stream = RowStream(shard)
    stream.look_up(IDS[:3], 4)
    stream.ask({0: IDS}, now=True)
    stream.rows(4)
    stream.look_up(IDS[:4], 4)
    wait_until(lambda: pieces.count(False) == 1)
    assert len(pieces) < 10, "only the last: four rows"


def test_preparing_ends_with_the_model_and_what_it_fails_at_stops_nothing(shard, pieces, monkeypatch):
    model = start_with(shard, table_spec())
    stream = RowStream(shard)
    monkeypatch.setattr(ShardTable, "memory_ahead", lambda table, ids: 1 / 0)
    before = stream.look_up(IDS, 4)
    result, _ = stream.exchange_rows(DENSE, {0: (IDS, np.zeros((IDS.size, 4), np.float32))})
    assert result.outcome == pb.OUTCOME_APPLIED
    assert np.array_equal(stream.look_up(IDS, 4), before)
    assert pieces == []
    monkeypatch.undo()
    assert model.tables[0].rows == IDS.size
