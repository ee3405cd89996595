"""A reader that applies the batches of a table's rounds has what the table has, also when changes come in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from ps_protocol.model.ids import buckets_of
from ps_server.shard import change_feed
from ps_server.shard.change_feed import ChangeBatch, FeedPosition, round_of
from ps_server.tables.step import RowStep
from ps_server.tables.table import ShardTable
from tests.support.length import choose, few
from tests.support.tables import array, table_spec

BUCKETS = 8
SPEC = table_spec(buckets=BUCKETS, dim=2, optimizer="adagrad")
IDS = np.arange(-40, 400)
BUCKET_OF = dict(zip(IDS.tolist(), buckets_of(IDS, BUCKETS).tolist(), strict=True))


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    for name, value in {
        "BATCH_ROWS": 7,
        "BATCH_BUCKETS": 3,
        "DELETED_IDS": 5,
        "SCAN_ROWS": 16,
        "ROUND_ROWS": 20,
    }.items():
        monkeypatch.setattr(change_feed, name, value)


@dataclass
class Reader:
    """Follows one shard's table into a copy that readers of other shards' tables share."""

    table: ShardTable
    buckets: list[int]
    copy: dict[int, tuple[float, ...]]
    since: FeedPosition | None = None
    round: Iterator[ChangeBatch | None] | None = None
    seen: list[ChangeBatch] = field(default_factory=list)

    def step(self) -> bool:
        """Whether the round ended, with everything there was when it began."""
        if self.round is None:
            self.round = round_of(self.table, self.since, self.buckets, SPEC.width)
        try:
            batch = next(self.round)
        except StopIteration:
            self.round = None
            return bool(self.seen) and self.seen[-1].current
        if batch is not None:
            self.take(batch)
        return False

    def take(self, batch: ChangeBatch) -> None:
        self.seen.append(batch)
        if batch.buckets:
            for id_ in [id_ for id_ in self.copy if BUCKET_OF[id_] in batch.buckets]:
                del self.copy[id_]
        for id_ in batch.deleted.tolist():
            self.copy.pop(id_, None)
        self.copy |= {id_: tuple(row) for id_, row in zip(batch.ids.tolist(), batch.rows.tolist(), strict=True)}
        self.since = batch.reached

    def breaks(self) -> None:
        self.round = None

    def ends(self) -> None:
        while not self.step():
            pass


def held(table: ShardTable) -> dict[int, tuple[float, ...]]:
    found = {}
    for bucket in range(BUCKETS):
        contents = table.contents(bucket)
        found |= {id_: tuple(row) for id_, row in zip(contents.ids.tolist(), contents.rows.tolist(), strict=True)}
    return found


class Job:
    """Two shards with one table, and what may happen to it."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        self.copy: dict[int, tuple[float, ...]] = {}
        self.updates = 0
        here = [list(range(0, BUCKETS, 2)), list(range(1, BUCKETS, 2))]
        self.readers = [Reader(ShardTable(SPEC, buckets), buckets, self.copy) for buckets in here]

    def reader_of(self, id_: int) -> Reader:
        return next(reader for reader in self.readers if BUCKET_OF[id_] in reader.buckets)

    def some(self, count: int) -> dict[int, np.ndarray]:
        """Random ids, by number of their shard."""
        ids = self.random.permutation(IDS)[: self.random.integers(0, count)]
        buckets = buckets_of(ids, BUCKETS)
        return {number: ids[np.isin(buckets, reader.buckets)] for number, reader in enumerate(self.readers)}

    def update(self) -> None:
        self.updates += 1
        for number, ids in self.some(60).items():
            gradients = self.random.standard_normal((ids.size, 2)).astype(np.float32)
            self.readers[number].table.apply(RowStep(0, ids, gradients, self.updates, SPEC.options))

    def drop(self) -> None:
        for number, ids in self.some(60).items():
            self.readers[number].table.drop(ids, array())

    def load(self) -> None:
        for number, ids in self.some(10).items():
            rows = self.random.standard_normal((ids.size, 2)).astype(np.float32)
            self.readers[number].table.load(ids, rows, with_state=False, only_new=bool(self.random.integers(2)))

    def restore(self) -> None:
        """A bucket as it was in some other life of the table."""
        reader = self.readers[self.random.integers(2)]
        if reader.buckets:
            bucket = int(self.random.choice(reader.buckets))
            other = ShardTable(SPEC, range(BUCKETS))
            ids = self.random.permutation(IDS)[:30]
            other.apply(RowStep(0, ids, np.ones((ids.size, 2), np.float32), 1, SPEC.options))
            reader.table.put(other.contents(bucket))

    def move(self) -> None:
        """A bucket goes to the other shard: both streams end, and begin again by the new map."""
        number = int(self.random.integers(2))
        source, target = self.readers[number], self.readers[1 - number]
        if not source.buckets:
            return
        bucket = int(self.random.choice(source.buckets))
        target.table.put(source.table.contents(bucket))
        source.table.forget(bucket)
        source.buckets.remove(bucket)
        target.buckets.append(bucket)
        for reader in self.readers:
            reader.breaks()

    def restart(self) -> None:
        """A shard comes back with the same rows, in another lineage."""
        reader = self.readers[self.random.integers(2)]
        again = ShardTable(SPEC, [])
        for bucket in reader.buckets:
            again.put(reader.table.contents(bucket))
        again.updates = reader.table.updates
        reader.table, reader.since = again, None
        reader.breaks()

    def read(self) -> None:
        for reader in self.readers:
            for _ in range(self.random.integers(0, 6)):
                reader.step()

    def break_off(self) -> None:
        self.readers[self.random.integers(2)].breaks()


WHAT = ("update", "update", "update", "drop", "load", "restore", "move", "restart", "break_off")


@pytest.mark.parametrize("happens", few([WHAT, ("update",), ("update", "drop"), ("update", "drop", "move")], 2))
def test_a_reader_of_all_shards_ends_with_what_they_hold(happens):
    for seed in range(choose(60, 20)):
        print(f"seed {seed}")
        job = Job(np.random.default_rng(seed))
        for _ in range(50):
            getattr(job, str(job.random.choice(happens)))()
            job.read()
        for reader in job.readers:
            reader.ends()
            reader.ends()
        assert job.copy == {**held(job.readers[0].table), **held(job.readers[1].table)}


def test_a_reader_that_goes_on_from_an_earlier_state_and_its_cursor_gets_equal():
    for seed in range(choose(40, 15)):
        print(f"seed {seed}")
        job = Job(np.random.default_rng(seed))
        kept = {}, None
        for _ in range(40):
            getattr(job, str(job.random.choice(["update", "drop", "load", "restore"])))()
            job.read()
            match job.random.integers(10):
                case 0:
                    kept = dict(job.copy), [each.since for each in job.readers]
                case 1 if kept[1]:
                    job.copy.clear()
                    job.copy.update(kept[0])
                    for each, since in zip(job.readers, kept[1], strict=True):
                        each.since = since
                        each.breaks()
        for each in job.readers:
            each.ends()
            each.ends()
        assert job.copy == {**held(job.readers[0].table), **held(job.readers[1].table)}


def used(table: ShardTable, updates: Sequence[Sequence[int]]) -> None:
    for ids in updates:
        table.apply(RowStep(0, array(*ids), np.ones((len(ids), 2), np.float32), table.updates + 1, SPEC.options))


def follow(table: ShardTable) -> Reader:
    reader = Reader(table, list(range(BUCKETS)), {})
    reader.ends()
    reader.seen.clear()
    return reader


def test_rows_come_in_the_order_of_their_last_use_and_the_cursor_names_whole_updates():
    table = ShardTable(SPEC, range(BUCKETS))
    reader = follow(table)
    used(table, [range(5), range(5, 10), range(10, 30), range(3, 8)])
    reader.ends()
    reader.ends()
    told = [id_ for batch in reader.seen for id_ in batch.ids.tolist()]
    assert sorted(told[:3]) == [0, 1, 2]
    assert sorted(told[3:5]) == [8, 9]
    assert sorted(told[5:25]) == list(range(10, 30))
    assert sorted(told[25:]) == list(range(3, 8))
    assert len({len(batch.ids) for batch in reader.seen} - set(range(8))) == 0
    reached = [batch.reached.updates for batch in reader.seen if batch.reached]
    assert reached == sorted(reached)
    assert {2, 4} <= set(reached)
    # Of the third update there are three batches; a reader that breaks off in it gets all of it again.
    ends = [
        batch.reached.updates for batch in reader.seen if batch.reached and set(batch.ids.tolist()) & {*range(10, 30)}
    ]
    assert ends[:2] == [2, 2]
    assert ends[-1] >= 3


def test_a_reader_that_is_behind_by_more_than_is_remembered_starts_over(monkeypatch):
    monkeypatch.setattr("ps_server.tables.changes.KEPT_CHANGES", 32)
    table = ShardTable(SPEC, range(BUCKETS))
    used(table, [range(100)])
    reader = follow(table)
    table.drop(np.arange(50), array())
    reader.ends()
    assert {bucket for batch in reader.seen for bucket in batch.buckets} == set(range(BUCKETS))
    assert reader.copy == held(table)


def test_a_cursor_from_the_future_starts_over():
    table = ShardTable(SPEC, range(BUCKETS))
    used(table, [range(10)])
    reader = follow(table)
    reader.since = FeedPosition(99, 0)
    reader.copy.clear()
    reader.ends()
    assert reader.copy == held(table)


def test_a_reader_that_has_everything_is_told_nothing():
    table = ShardTable(SPEC, range(BUCKETS))
    used(table, [range(10)])
    reader = follow(table)
    reader.ends()
    assert [batch.empty for batch in reader.seen] == [True]


def test_the_end_of_a_reader_far_behind_comes_in_several_rounds_of_bounded_size():
    table = ShardTable(SPEC, range(BUCKETS))
    reader = follow(table)
    used(table, [range(10 * number, 10 * number + 10) for number in range(20)])
    reader.ends()
    assert sum(len(batch.ids) for batch in reader.seen) == 200
    assert reader.copy == held(table)
