"""Buckets of tables move between shards: every row stays as it was, and nothing is lost whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.ids import buckets_of
from ps_protocol.model.spec import ModelSpec
from ps_protocol.model.tables import RowLife
from ps_server.log.entries import StagedReshard
from ps_server.shard.reconcile import Reconciliation, reconcile
from ps_server.shard.transfer import TransferPlan, transfer_plan
from ps_server.state.model_state import new_model
from ps_server.state.reshard import resharded
from ps_server.tables.bucket_contents import BucketContents
from tests.shard.reshard.moving import (
    NEVER,
    OFTEN,
    ROWS,
    crash_image,
    gradients_of,
    job,
    map_of,
    payload_of,
    spec_of,
)
from tests.shard.reshard.moving_worker import Worker, assert_same
from tests.support.length import few, paired
from tests.support.seeds import seeded
from tests.support.shards import wait_until
from tests.support.tables import RowStream, table_spec

BUCKETS = 4
HERE, THERE = [0, 0, 1, 1, 0], [0, 1, 2, 0, 2]
ADS, USERS = [0, 0, 1, 1], [1, 0, 1, 0]
ADS_THERE, USERS_THERE = [2, 0, 0, 1], [2, 2, 2, 2]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small segments, for they are copied whole; snapshots that begin at once."""
    monkeypatch.setattr("ps_server.log.segments.SEGMENT_BYTES", 1 << 18)
    monkeypatch.setattr("ps_server.shard.times.SNAPSHOT_LOOK_SECONDS", 0.001)


def spec() -> ModelSpec:
    tables = (
        table_spec("ads", 4, "adam", buckets=BUCKETS),
        table_spec("users", 3, "rowwise_adagrad", buckets=BUCKETS, life=RowLife(admit_after=2)),
    )
    return replace(spec_of(momentum=0.9), tables=tables)


class RowWorker(Worker):
    """Pushes rows of both tables, too; to each shard those of its buckets."""

    def open(self) -> None:
        made = self._job
        epoch = made.maps["model"].epoch
        self.streams = {n: RowStream(made.nodes[n], self.rank, made.live[self.rank], epoch=epoch) for n in made.holders}

    def repeat(self) -> None:
        held = self._job.maps["model"]
        generator = np.random.default_rng(1000 * self.rank + self.step)
        rows = {}
        for number, table in enumerate(held.spec.tables):
            ids = np.sort(generator.choice(60, 20, replace=False))
            rows[number] = ids, generator.standard_normal((20, table.dim)).astype(np.float32)
        for number, stream in self.streams.items():
            owned = {}
            for table, (ids, values) in rows.items():
                here = np.array(held.tables[table])[buckets_of(ids, BUCKETS)] == number
                owned[table] = ids[here], values[here]
            dense = payload_of(self._job.model(number).layout, gradients_of(held.spec, self.step))
            stream.push_rows(dense, owned, sequence=self.step, clock=self.step, with_buffers=True)


def raw(contents: Sequence[BucketContents]) -> list[tuple[object, ...]]:
    return [(each.bucket, each.updates, each.rows.shape, *map(bytes, each.pieces())) for each in contents]


def undisturbed(steps: int) -> list[tuple[object, ...]]:
    with job(spec(), [0] * len(ROWS), 1, tables=[[0] * BUCKETS] * 2) as alone:
        worker = RowWorker(alone)
        worker.train(steps)
        found = raw(alone.rows())
        worker.end()
        return found


# -- decided without a shard


def test_every_bucket_comes_from_the_shard_that_has_it():
    held = map_of(spec(), HERE, tables=(ADS, USERS))
    wanted = map_of(spec(), HERE, epoch=2, tables=(ADS_THERE, USERS_THERE))
    assert transfer_plan(held, wanted, 0) == [TransferPlan(1, (), ((0, (2,)),))]
    assert transfer_plan(held, wanted, 1) == []
    assert transfer_plan(held, wanted, 2) == [
        TransferPlan(0, (), ((0, (0,)), (1, (1, 3)))),
        TransferPlan(1, (), ((1, (0, 2)),)),
    ]


def test_where_buckets_lie_decides_how_a_shard_goes_on_with_what_it_kept():
    held, wanted = map_of(spec(), HERE, tables=(ADS, USERS)), map_of(spec(), HERE, 2, tables=(ADS_THERE, USERS))
    assert reconcile(0, held, wanted, held) is Reconciliation.KEEP
    assert reconcile(0, held, wanted, wanted) is Reconciliation.RESHARD
    gone = map_of(spec(), [1, 1, 1, 1, 1], 7, tables=[[1] * BUCKETS] * 2)
    assert reconcile(0, held, wanted, gone) is Reconciliation.RESET
    kept = map_of(spec(), [1, 1, 1, 1, 1], 7, tables=([1] * BUCKETS, [1, 1, 1, 0]))
    with pytest.raises(Exception, match="cut for another cluster"):
        reconcile(0, held, wanted, kept)


def test_a_bucket_that_did_not_come_is_missed_and_nothing_changes():
    held, wanted = map_of(spec(), HERE, tables=(ADS, USERS)), map_of(spec(), HERE, 2, tables=(ADS_THERE, USERS))
    model = new_model(held, 0)
    model.pending = StagedReshard(wanted, (), memoryview(b""), [])
    with pytest.raises(InvalidRequest, match=r"was not given a bucket .* variable: ads; shard: 0; expected: bucket 2"):
        resharded(model, 0)
    assert model.replica.tables[0].here.tolist() == [True, True, False, False]


# -- real shards


def test_rows_that_moved_are_the_same_with_waiting_ids_and_counters_and_training_goes_on():
    with job(spec(), HERE, tables=(ADS, USERS)) as made:
        worker = RowWorker(made)
        worker.train(3)
        before = raw(made.rows())
        assert sum(each.waiting_ids.size for each in made.rows()) > 0
        made.move(THERE, (ADS_THERE, USERS_THERE))
        assert raw(made.rows()) == before
        worker.open()
        assert {stream.opened.last_sequence for stream in worker.streams.values()} == {3}
        worker.train(3)
        assert raw(made.rows()) == undisturbed(6)
        worker.end()


def test_a_shard_that_gets_nothing_but_buckets_knows_the_pushes_and_rows_that_stay_are_not_copied():
    with job(spec(), HERE, tables=(ADS, USERS)) as made:
        worker = RowWorker(made)
        worker.train(2)
        tables, before = made.model(0).tables, raw(made.rows())
        made.move(HERE, (ADS, [1, 2, 1, 0]))
        assert [id(table) for table in made.model(0).tables] == [id(table) for table in tables]
        assert raw(made.rows()) == before
        assert (len(made.model(2).layout.slices), made.model(2).layout.buckets) == (0, ((), (1,)))
        worker.open()
        assert worker.streams[2].opened.last_sequence == 2
        worker.train(2)
        assert raw(made.rows()) == undisturbed(4)
        worker.end()


def test_a_drained_shard_holds_no_row_and_one_gets_everything_back():
    with job(spec(), HERE, tables=(ADS, USERS)) as made:
        worker = RowWorker(made)
        worker.train(3)
        before = raw(made.rows())
        for number in (1, 2, 0):
            made.move([number] * len(ROWS), [[number] * BUCKETS] * 2)
            assert raw(made.rows()) == before
            for other in {0, 1, 2} - {number}:
                assert {(table.rows, table.waiting) for table in made.model(other).tables} == {(0, 0)}
        worker.open()
        worker.train(1)
        assert raw(made.rows()) == undisturbed(4)
        worker.end()


def test_an_aborted_move_leaves_every_row_where_it_was():
    with job(spec(), HERE, tables=(ADS, USERS)) as made:
        worker = RowWorker(made)
        worker.train(2)
        before = raw(made.rows())
        made.prepare_all(made.next_map(THERE, (ADS_THERE, USERS_THERE)))
        made.abort()
        assert raw(made.rows()) == before
        worker.train(2)
        assert raw(made.rows()) == undisturbed(4)
        worker.end()


# -- on disk


POINTS = [
    ("after_prepare_log", False),
    ("after_prepare_log", True),
    ("before_switch_log", True),
    ("after_switch_log", True),
]


@pytest.mark.parametrize(("number", "point_holds"), few(paired([0, 2], POINTS), 2), ids=str)
def test_a_shard_killed_while_buckets_move_comes_back_as_was_decided(tmp_path, number, point_holds):
    """A shard that loses and gets buckets, and one that had none."""
    point, holds = point_holds
    with job(spec(), HERE, path=tmp_path, tables=(ADS, USERS)) as made:
        worker = RowWorker(made)
        worker.train(3)
        before = raw(made.rows())
        copied = crash_image(made.nodes[number], point, tmp_path / "image")
        wanted = made.next_map(THERE, (ADS_THERE, USERS_THERE))
        made.prepare_all(wanted)
        if holds:
            made.commit(wanted)
        wait_until(copied)
        if not holds:
            made.abort()
        made.start(number, tmp_path / "image")
        assert made.model(number).layout.shard_map == made.maps["model"]
        assert raw(made.rows()) == before
        worker.open()
        worker.train(2)
        assert raw(made.rows()) == undisturbed(5)
        worker.end()


@pytest.mark.parametrize("rule", few([OFTEN, NEVER]), ids=few(["snapshots", "log"]))
@pytest.mark.usefixtures("row_memory")
def test_moves_and_pushes_in_turn_are_all_in_the_log(tmp_path, rule):
    chance = seeded()
    with job(spec(), HERE, path=tmp_path, tables=(ADS, USERS), rule=rule) as made:
        worker = RowWorker(made)
        for _ in range(4):
            worker.train(2)
            made.move(chance.choices(range(3), k=len(ROWS)), [chance.choices(range(3), k=BUCKETS) for _ in range(2)])
            worker.open()
        worker.train(1)
        worker.end()
        before, values, state = raw(made.rows()), made.values(), made.state()
        for number in range(3):
            made.loop.run(made.nodes[number].storage.close(snapshot=False))
            made.start(number, tmp_path / f"of-{number}")
        assert raw(made.rows()) == before == undisturbed(9)
        assert_same(made.values(), values)
        assert_same(made.state(), state)
        assert {made.model(number).tracker.version for number in made.holders} == {9}
