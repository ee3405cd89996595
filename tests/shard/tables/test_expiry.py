"""Rows that go by themselves: which, when, and that a replay of the log knows of it."""

from __future__ import annotations

import numpy as np

from ps_protocol.model.spec import Consistency, Mode
from ps_protocol.model.tables import Eviction, RowLife
from ps_server.log.entries import RowsDropped
from ps_server.shard.rows_service import RowExpiry
from tests.support.shards import RecordingLog, running_shard, wait_until
from tests.support.tables import RowStream, array, start_with, table_spec

DENSE = bytes(64)


class KeepingLog(RecordingLog):
    """Keeps what was dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped: list[RowsDropped] = []

    def append(self, entry):
        if isinstance(entry, RowsDropped):
            self.dropped.append(entry)
        return super().append(entry)


def push(stream: RowStream, *ids: int) -> None:
    stream.exchange_rows(DENSE, {0: (array(*ids), np.ones((len(ids), 4), np.float32))})


def age(shard, seconds: float = 0.0) -> None:
    """Let rows go that have to at this time."""
    model = shard.model()
    shard.loop.run(RowExpiry(lambda: [model], lambda: seconds).look(model))


def ids_of(model) -> list[int]:
    table = model.tables[0]
    return sorted(int(each) for bucket in range(16) for each in table.contents(bucket).ids)


def test_rows_not_used_for_so_many_updates_go_and_have_initial_values_when_they_come_back():
    with running_shard() as shard:
        model = start_with(shard, table_spec(life=RowLife(expire_after_updates=3)))
        stream = RowStream(shard)
        first = stream.look_up(array(1), 4)
        push(stream, 1, 2)
        for _ in range(2):
            push(stream, 2)
            age(shard)
        assert ids_of(model) == [1, 2]
        push(stream, 2)
        age(shard)
        assert ids_of(model) == [2]
        assert np.array_equal(stream.look_up(array(1), 4), first)
        assert model.tables[0].expired == 1


def test_rows_not_used_for_so_long_go():
    with running_shard() as shard:
        model = start_with(shard, table_spec(life=RowLife(expire_after_seconds=60)))
        stream = RowStream(shard)
        for minute in range(4):
            push(stream, minute, 99)
            age(shard, 60.0 * minute)
        age(shard, 60.0 * 5)
        left = ids_of(model)
        assert 0 not in left
        age(shard, 60.0 * 10)
        assert ids_of(model) == []


def test_a_row_of_a_push_whose_step_is_open_stays():
    with running_shard({0: 1, 1: 2}, Consistency(Mode.SYNC)) as shard:
        model = start_with(shard, table_spec(life=RowLife(max_rows=16, eviction=Eviction.LRU)))
        one, two = RowStream(shard), RowStream(shard, rank=1, incarnation=2)
        one.push_rows(DENSE, {0: (array(*range(40)), np.ones((40, 4), np.float32))})
        two.push_rows(DENSE, {})
        one.result(), two.result()
        one.push_rows(DENSE, {0: (array(3, 4, 5), np.ones((3, 4), np.float32))})
        wait_until(lambda: len(model.rows.held_ids(0)) == 1)
        age(shard)
        assert len(ids_of(model)) <= 16
        assert {3, 4, 5} <= set(ids_of(model))


def test_what_goes_is_written_down_by_its_ids():
    log = KeepingLog()
    with running_shard(log=log) as shard:
        start_with(shard, table_spec(life=RowLife(admit_after=2, expire_after_updates=1)))
        stream = RowStream(shard)
        push(stream, 1, 2)
        push(stream, 2)
        push(stream, 7)
        push(stream, 8)
        age(shard)
        (entry,) = log.dropped
        assert (entry.ids.tolist(), sorted(entry.waiting.tolist())) == ([2], [1, 7])


def test_nothing_goes_while_the_job_is_copied_at_one_point():
    with running_shard() as shard:
        model = start_with(shard, table_spec(life=RowLife(max_rows=16, eviction=Eviction.LRU)))
        stream = RowStream(shard)
        push(stream, *range(40))

        async def hold() -> None:
            model.gate.pause()

        async def resume() -> None:
            model.resume()

        shard.loop.run(hold())
        age(shard)
        assert len(ids_of(model)) == 40
        shard.loop.run(resume())
        age(shard)
        assert len(ids_of(model)) <= 16
