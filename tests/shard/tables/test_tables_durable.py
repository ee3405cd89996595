"""A shard with tables that is killed comes back with every row, every counter and every waiting id, bit for bit."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from ps_server.cli.options.storage import Durability
from tests.log.support import segments
from tests.shard.disks import NEVER, OFTEN, copy_of, held, shard_on
from tests.support.seeds import seeded
from tests.support.shards import wait_until
from tests.support.table_bits import served_bits
from tests.support.tables import RowStream, array, load_rows, start_with, table_spec
from tests.support.tables_by_chance import DENSE_BYTES, TABLES, numbers, push, train


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Several blocks, groups, segments and snapshots, also of tables of some bytes."""
    monkeypatch.setattr("ps_server.state.blocks.BLOCK_BYTES", 40)
    monkeypatch.setattr("ps_server.state.blocks.GROUP_BYTES", 3 << 14)
    monkeypatch.setattr("ps_server.log.segments.SEGMENT_BYTES", 1 << 18)
    monkeypatch.setattr("ps_server.shard.times.SNAPSHOT_LOOK_SECONDS", 0.001)


def assert_same(shard, model, again, other):
    assert torch.equal(held(again, other), held(shard, model))
    assert served_bits(again, other) == served_bits(shard, model)
    assert other.tracker.version == model.tracker.version
    assert [(t.rows, t.waiting, t.updates) for t in other.tables] == [
        (t.rows, t.waiting, t.updates) for t in model.tables
    ]


@pytest.mark.parametrize("rule", [NEVER, OFTEN], ids=["log", "snapshots"])
@pytest.mark.usefixtures("row_memory")
def test_a_killed_shard_comes_back_with_every_row_and_counter(tmp_path, rule, killed):
    chance = seeded()
    with shard_on(tmp_path / "a", rule=rule) as shard:
        model = start_with(shard, *TABLES)
        stream = RowStream(shard)
        train(chance, shard, model, stream, 40)
        ads, users, words = model.tables
        assert ads.waiting
        assert ads.evicted
        assert users.expired
        assert words.evicted
        with killed(shard, rule=rule) as again:
            other = again.place(model.layout.shard_map)
            assert_same(shard, model, again, other)
            # Training goes on as if nothing had happened, also with what is counted.
            resumed = RowStream(again)
            for _ in range(10):
                one, two = push(chance, [stream, resumed])
                assert one == two
            assert_same(shard, model, again, other)
            resumed.end()
        stream.end()


def test_snapshots_are_taken_while_workers_push_rows_and_the_log_is_cut(tmp_path, killed, monkeypatch):
    monkeypatch.setattr("ps_server.log.segments.SEGMENT_BYTES", 1 << 14)
    monkeypatch.setattr("ps_server.log.record.MESSAGE_BYTES", 1 << 12)
    chance, done = seeded(), threading.Event()
    with shard_on(tmp_path / "a", {0: 1, 1: 2}, rule=OFTEN) as shard:
        model = start_with(shard, *TABLES)

        def work(rank):
            stream = RowStream(shard, rank, incarnation=rank + 1)
            while not done.is_set():
                train(chance, shard, model, stream, 1)
            stream.end()

        workers = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
        for worker in workers:
            worker.start()
        log = shard.storage._durable
        wait_until(lambda: shard.storage._snapshotter.count >= 10 and log._segments.live()[0].first > 1)
        done.set()
        for worker in workers:
            worker.join()
        with killed(shard, {0: 1, 1: 2}) as again:
            other = again.place(model.layout.shard_map)
            assert_same(shard, model, again, other)
            assert other.tracker.persisted_state() == model.tracker.persisted_state()


@pytest.mark.parametrize(("point", "there"), [("before_log", False), ("after_log_before_apply", True)])
def test_a_push_is_whole_or_not_there_when_its_shard_dies_at(tmp_path, point, there):
    chance = seeded()
    with shard_on(tmp_path / "a") as shard:
        model = start_with(shard, *TABLES)
        stream = RowStream(shard)
        train(chance, shard, model, stream, 10)
        before = served_bits(shard, model)

        def copy():
            copy_of(tmp_path / "a", tmp_path / "b")
            shard.failpoints.disarm(point)

        shard.failpoints.arm(point, copy)
        push(chance, [stream])
        with shard_on(tmp_path / "b") as again:
            other = again.place(model.layout.shard_map)
            assert served_bits(again, other) == (served_bits(shard, model) if there else before)
            assert other.tracker.version == 10 + there
        stream.end()


@pytest.mark.parametrize("drops", [False, True], ids=["push", "drop"])
def test_a_record_that_is_torn_in_its_rows_is_not_there(tmp_path, drops):
    chance = seeded()
    with shard_on(tmp_path / "a") as shard:
        model = start_with(shard, *TABLES)
        stream = RowStream(shard)
        train(chance, shard, model, stream, 10)
        while drops and model.tables[0].rows <= 32:
            push(chance, [stream])
        before, version = served_bits(shard, model), model.tracker.version
        log = shard.storage._durable
        written = log._open.offset
        if drops:
            assert shard.loop.run(model.rows.expire(0, 0.0))
        else:
            push(chance, [stream])
        end = log._open.offset
        copy_of(tmp_path / "a", tmp_path / "b")
        with segments(tmp_path / "b")[-1].open("r+b") as file:
            half = (written + end) // 2
            file.seek(half)
            file.write(bytes(end - half))
        with shard_on(tmp_path / "b") as again:
            other = again.place(model.layout.shard_map)
            assert served_bits(again, other) == before
            assert other.tracker.version == version
        stream.end()


def test_rows_that_were_loaded_are_kept(tmp_path, killed):
    with shard_on(tmp_path / "a") as shard:
        model = start_with(shard, *TABLES)
        load_rows(shard, array(1, 2, 3), numbers(seeded(), 3, TABLES[1].width), table=1, with_state=True)
        with killed(shard) as again:
            assert_same(shard, model, again, again.place(model.layout.shard_map))


@pytest.mark.usefixtures("row_memory")
def test_a_snapshot_writes_the_rows_that_changed_and_a_restart_reads_all_of_them(tmp_path, killed):
    ids, chance = np.arange(5000), seeded()
    rows = tmp_path / "a" / "shard-0" / "snapshots"
    with shard_on(tmp_path / "a") as shard:
        model = start_with(shard, table_spec(optimizer="adagrad", dim=8))
        stream = RowStream(shard)

        def change(count):
            some = np.sort(np.array(chance.sample(range(5000), count)))
            stream.exchange_rows(bytes(DENSE_BYTES), {0: (some, numbers(chance, count, 8))})

        def written(storage=shard.storage, loop=shard.loop):
            before = storage.snapshotter.written_bytes
            loop.run(storage.snapshotter.take())
            return storage.snapshotter.written_bytes - before

        load_rows(shard, ids, numbers(chance, 5000, 8))
        whole = written()
        for _ in range(3):
            change(20)
            assert written() < 0.1 * whole
        # Four, or more where pushes have outrun the making of files.
        assert len(list(rows.glob("*/rows.bin"))) == shard.storage.snapshotter.count >= 4
        change(50)
        with killed(shard) as again:
            assert_same(shard, model, again, again.place(model.layout.shard_map))
            # What was read from the disk is not written again either.
            assert written(again.storage, again.loop) < 0.1 * whole
        for _ in range(6):
            change(1000)
            written()
        with killed(shard) as again:
            assert_same(shard, model, again, again.place(model.layout.shard_map))
        assert len(list(rows.glob("*/rows.bin"))) < 5, "all is written again once changes take half of it"
        stream.end()


@pytest.mark.parametrize("damage", ["removed", "cut"])
def test_a_snapshot_has_all_rows_where_a_file_of_earlier_ones_is_not_there(tmp_path, killed, damage):
    ids, chance = np.arange(1000), seeded()
    with shard_on(tmp_path / "a") as shard:
        model = start_with(shard, table_spec(optimizer="adagrad", dim=8))
        stream = RowStream(shard)
        load_rows(shard, ids, numbers(chance, 1000, 8))
        shard.loop.run(shard.storage.snapshotter.take())
        stream.exchange_rows(bytes(DENSE_BYTES), {0: (ids[:5], numbers(chance, 5, 8))})
        shard.loop.run(shard.storage.snapshotter.take())
        first = min((tmp_path / "a" / "shard-0" / "snapshots").glob("*/rows.bin"))
        if damage == "cut":
            os.truncate(first, 100)
        else:
            shutil.rmtree(first.parent)
        stream.exchange_rows(bytes(DENSE_BYTES), {0: (ids[5:9], numbers(chance, 4, 8))})
        shard.loop.run(shard.storage.snapshotter.take())
        with killed(shard) as again:
            assert_same(shard, model, again, again.place(model.layout.shard_map))
        stream.end()


def test_a_snapshot_counts_although_those_before_cannot_be_removed(tmp_path, killed, monkeypatch, caplog):
    ids, chance = np.arange(1000), seeded()
    with shard_on(tmp_path / "a") as shard:
        model = start_with(shard, table_spec(optimizer="adagrad", dim=8))
        stream = RowStream(shard)
        load_rows(shard, ids, numbers(chance, 1000, 8))
        shard.loop.run(shard.storage.snapshotter.take())

        def fails(self, target):
            raise OSError(errno.EIO, "I/O error")

        load_rows(shard, ids, numbers(chance, 1000, 8))
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", fails)
            shard.loop.run(shard.storage.snapshotter.take())
        assert "is not freed" in caplog.text
        stream.exchange_rows(bytes(DENSE_BYTES), {0: (ids[5:9], numbers(chance, 4, 8))})
        shard.loop.run(shard.storage.snapshotter.take())
        assert len(list((tmp_path / "a" / "shard-0" / "snapshots").glob("[0-9]*"))) == 1
        with killed(shard) as again:
            assert_same(shard, model, again, again.place(model.layout.shard_map))
        stream.end()


def test_with_snapshot_durability_an_id_that_is_lost_has_its_first_values_again(tmp_path, killed):
    fields = {"durability": Durability.SNAPSHOT, "rule": NEVER}
    ids = array(1, 2, 3)
    with shard_on(tmp_path / "a", **fields) as shard:
        model = start_with(shard, table_spec())
        stream = RowStream(shard)
        first = stream.look_up(ids, 4)
        stream.exchange_rows(bytes(DENSE_BYTES), {0: (ids[:1].copy(), np.ones((1, 4), np.float32))})
        shard.loop.run(shard.storage._snapshotter.take())
        kept = stream.look_up(ids, 4)
        stream.exchange_rows(bytes(DENSE_BYTES), {0: (ids[:2].copy(), np.ones((2, 4), np.float32))})
        with killed(shard, **fields) as again:
            other = again.place(model.layout.shard_map)
            assert (other.tables[0].rows, other.tables[0].updates) == (1, 1)
            found = RowStream(again).look_up(ids, 4)
            assert np.array_equal(found, kept)
            assert np.array_equal(found[1:], first[1:])
        stream.end()
    # A shard that is stopped, not killed, loses nothing.
    with shard_on(tmp_path / "a", **fields) as again:
        assert again.place(model.layout.shard_map).tables[0].rows == 2
