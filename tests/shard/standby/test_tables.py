"""A standby has the rows of its shard: by the log alone, by a copy made under training, and on its disk."""

from __future__ import annotations

import threading

import pytest
import torch

from ps_server.log.recovery import recover
from tests.recovery.rows_kept import assert_each_push_is_in_its_rows_once
from tests.shard.disks import held
from tests.shard.standby.support import NEVER, OFTEN, follower, primary
from tests.support.seeds import seeded
from tests.support.shards import wait_until
from tests.support.table_bits import bits_of, served_bits
from tests.support.tables import RowStream, start_with
from tests.support.tables_by_chance import TABLES, push, train


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Several blocks, groups, segments and pieces, also of tables of some bytes."""
    monkeypatch.setattr("ps_server.state.blocks.BLOCK_BYTES", 40)
    monkeypatch.setattr("ps_server.state.blocks.GROUP_BYTES", 3 << 14)
    monkeypatch.setattr("ps_server.log.segments.SEGMENT_BYTES", 1 << 16)
    monkeypatch.setattr("ps_server.log.record.MESSAGE_BYTES", 1 << 12)
    monkeypatch.setattr("ps_server.log.reader.PIECE_BYTES", 300)
    monkeypatch.setattr("ps_server.shard.times.SNAPSHOT_LOOK_SECONDS", 0.001)


def assert_same(following, shard, model):
    """The follower has the shard's rows, in memory and on its disk."""
    following.reach(shard)
    rows, values, buckets = served_bits(shard, model), held(shard, model), model.layout.buckets
    followed = following.model()
    assert bits_of(followed.replica.tables, buckets) == rows
    assert torch.equal(following.values, values)
    assert followed.tracker.persisted_state() == model.tracker.persisted_state()
    following.end()
    following.loop.run(following.storage.give_up_snapshots())
    again = recover(following.storage.kept[0], log_goes_on=True).models["model"]
    assert bits_of(again.replica.tables, buckets) == rows
    assert torch.equal(again.replica.region.data, values)


@pytest.mark.parametrize("rule", [NEVER, OFTEN], ids=["log", "snapshots"])
@pytest.mark.usefixtures("row_memory")
def test_a_standby_there_from_the_beginning_has_the_same_rows(tmp_path, rule):
    chance = seeded()
    with primary(tmp_path / "a") as shard, follower(tmp_path / "b", rule) as following:
        following.begin(shard)
        model = start_with(shard, *TABLES)
        stream = RowStream(shard)
        train(chance, shard, model, stream, 30)
        shard.covered()
        if rule is OFTEN:
            wait_until(lambda: following.storage._snapshotter.count > 0)
            train(chance, shard, model, stream, 5)
        stream.end()
        assert_same(following, shard, model)


def test_a_standby_that_comes_late_copies_buckets_under_training(tmp_path):
    chance, done = seeded(), threading.Event()
    with primary(tmp_path / "a", rule=OFTEN) as shard, follower(tmp_path / "b") as following:
        model = start_with(shard, *TABLES)
        stream = RowStream(shard)
        while not shard.log._segments.live() or shard.log._segments.live()[0].first == 1:
            push(chance, [stream])

        def work():
            while not done.is_set():
                train(chance, shard, model, stream, 1)

        worker = threading.Thread(target=work)
        worker.start()
        following.begin(shard)
        shard.covered()
        done.set()
        worker.join()
        stream.end()
        assert_same(following, shard, model)


def test_the_standby_of_a_killed_shard_goes_on_with_every_row(pair):
    made = pair("--acknowledge", "after", "--snapshot-seconds", "0.05")
    worker = made.cluster.worker(steps=60, rows=200, pauses=[20])
    worker.read("step 20")
    made.wait_until_covered(1)
    worker.tell()
    worker.read("step 30")
    made.first.kill()
    made.wait_for(made.second)
    data = made.cluster.folder / "data-second"
    assert_each_push_is_in_its_rows_once(made.cluster, made.second, worker, data, 60, 200)
