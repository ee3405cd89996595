"""A copy that follows a table is what the shards hold: through pushes, restarts, moves, and its own restarts."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from ps_protocol.errors import DamagedData, InvalidRequest, Unavailable, UnknownModel
from ps_protocol.feed.cursor import load_cursor, save_cursor
from ps_protocol.model.ids import buckets_of
from ps_worker.feed import TableCopy
from tests.feed.following import FakeCoordinator, held, rows_of, until_equal
from tests.shard.reshard.moving import job
from tests.shard.reshard.test_table_moves import (
    ADS,
    ADS_THERE,
    BUCKETS,
    HERE,
    THERE,
    USERS,
    USERS_THERE,
    RowWorker,
    spec,
)
from tests.support.tables import load_rows


def test_a_reader_gets_what_is_there_and_then_what_changes(made, worker):
    worker.train(2)
    changes, copy = iter(FakeCoordinator(made).feed()), TableCopy()
    until_equal(changes, copy, made)
    assert len(copy) > 0
    for _ in range(3):
        worker.train(1)
        taken = until_equal(changes, copy, made)
        assert not any(change.reset_buckets for change in taken)
    changes.close()


def test_rows_come_with_their_state_where_that_is_asked(made, worker):
    worker.train(2)
    copy = TableCopy()
    until_equal(iter(FakeCoordinator(made).feed(with_state=True)), copy, made, with_state=True)
    assert copy.rows(copy.ids).shape[1] == 12


def test_a_reader_that_does_not_follow_ends_when_it_has_everything(made, worker):
    worker.train(2)
    copy = TableCopy()
    changes = list(FakeCoordinator(made).feed(follow=False))
    for change in changes:
        copy.apply(change)
    assert changes[-1].whole
    assert rows_of(copy) == held(made)
    again = list(FakeCoordinator(made).feed(cursor=copy.cursor, follow=False))
    assert sum(change.ids.size + change.deleted.size + len(change.reset_buckets) for change in again) == 0


def test_rows_that_are_loaded_and_rows_that_went_are_told(made, worker):
    worker.train(1)
    changes, copy = iter(FakeCoordinator(made).feed()), TableCopy()
    until_equal(changes, copy, made)
    here = copy.ids[buckets_of(copy.ids, BUCKETS) < 2]
    load_rows(made.nodes[0], here[:3], np.full((3, 4), 9, np.float32))
    until_equal(changes, copy, made)
    assert (copy.rows(here[:3]) == 9).all()

    async def drop():
        from ps_server.log.entries import RowsDropped

        model = await made.nodes[0].registry.model("model")
        await model.rows.write(RowsDropped("model", 0, here[:5], np.empty(0, np.int64)), 1000)

    made.loop.run(drop())
    taken = until_equal(changes, copy, made)
    assert {id_ for change in taken for id_ in change.deleted.tolist()} == set(here[:5].tolist())
    assert not copy.has(here[:5]).any()
    changes.close()


def test_a_reader_goes_through_moves_of_buckets(made, worker):
    worker.train(2)
    coordinator, copy = FakeCoordinator(made), TableCopy()
    changes = iter(coordinator.feed())
    until_equal(changes, copy, made)
    made.move(THERE, (ADS_THERE, USERS_THERE))
    coordinator.show()
    worker.open()
    worker.train(2)
    taken = until_equal(changes, copy, made)
    # What stayed is not told again.
    assert {bucket for change in taken for bucket in change.reset_buckets} == {0, 2}
    made.move(HERE, (ADS, USERS))
    coordinator.show()
    worker.open()
    worker.train(1)
    until_equal(changes, copy, made)
    changes.close()


def test_a_reader_that_was_away_during_a_move_goes_on_from_its_cursor(made, worker):
    worker.train(2)
    coordinator, copy = FakeCoordinator(made), TableCopy()
    changes = iter(coordinator.feed())
    until_equal(changes, copy, made)
    changes.close()
    made.move(THERE, (ADS_THERE, USERS_THERE))
    worker.open()
    worker.train(1)
    taken = until_equal(iter(coordinator.feed(cursor=copy.cursor)), copy, made)
    assert {bucket for change in taken for bucket in change.reset_buckets} == {0, 2}


def test_a_reader_says_that_it_waits_for_a_shard_and_starts_over_there_when_it_is_back(tmp_path):
    with job(spec(), HERE, path=tmp_path, tables=(ADS, USERS)) as made:
        worker = RowWorker(made)
        worker.train(2)
        said = []
        coordinator, copy = FakeCoordinator(made), TableCopy()
        changes = iter(coordinator.feed(say=said.append))
        until_equal(changes, copy, made)
        old = made.nodes[0]

        async def stop():
            old.registry.stop(Unavailable("killed"))
            await old.storage.close(snapshot=False)

        made.loop.run(stop())
        made.start(0, old.path)
        made.show()
        coordinator.show()
        worker.open()
        worker.train(1)
        taken = until_equal(changes, copy, made)
        assert {bucket for change in taken for bucket in change.reset_buckets} == {0, 1}
        assert any("shard 0" in text for text in said)
        changes.close()
        worker.end()


def test_the_end_of_the_job_ends_the_stream_when_everything_has_come(made, worker):
    worker.train(1)
    coordinator, copy = FakeCoordinator(made), TableCopy()
    changes = iter(coordinator.feed())
    until_equal(changes, copy, made)
    worker.train(1)
    coordinator.finished = True
    coordinator.show()
    for change in changes:
        copy.apply(change)
    assert rows_of(copy) == held(made)


def test_a_copy_and_its_cursor_survive_the_reader(made, worker, tmp_path):
    worker.train(2)
    coordinator, copy = FakeCoordinator(made), TableCopy()
    until_equal(iter(coordinator.feed()), copy, made)
    copy.save(tmp_path / "ads")
    worker.train(2)
    again = TableCopy.load(tmp_path / "ads")
    assert rows_of(again) == rows_of(copy)
    taken = until_equal(iter(coordinator.feed(cursor=again.cursor)), again, made)
    assert not any(change.reset_buckets for change in taken)


def test_a_reader_waits_for_a_model_that_nobody_has_declared_yet(made, worker):
    coordinator = FakeCoordinator(made)
    held_map = made.maps.pop("model")
    said = []
    feed = coordinator.feed(say=said.append)
    with pytest.raises(UnknownModel):
        list(coordinator.feed(follow=False))
    made.maps["model"] = held_map
    coordinator.job.maps, declared = {}, coordinator.job.maps
    changes = iter(feed)

    def say(text):
        said.append(text)
        coordinator.job.maps = declared
        coordinator.show()

    feed._say_to = say
    worker_copy = TableCopy()
    worker_copy.apply(next(changes))
    assert "model 'model'" in said[0]
    changes.close()


def test_a_table_that_is_not_there_is_named_with_those_that_are(made):
    with pytest.raises(InvalidRequest, match=r"no table 'adds'.*expected: ads, users"):
        next(iter(FakeCoordinator(made).feed("adds")))


@pytest.mark.parametrize(
    ("cursor", "part"),
    [
        ("yesterday", "not a cursor"),
        ({"model": "model", "table": "ads", "shards": {"0": {"lineage": 5}}}, "not a cursor"),
        ({"model": "model", "table": "ads", "shards": {"first": {}}}, "not a cursor"),
        ({"model": "model", "table": "users", "shards": {}}, "another table"),
    ],
)
def test_a_wrong_cursor_is_refused(made, cursor, part):
    with pytest.raises(InvalidRequest, match=part):
        FakeCoordinator(made).feed(cursor=cursor)


def test_a_cursor_of_an_earlier_process_of_the_shards_starts_over(made, worker):
    worker.train(1)
    coordinator, copy = FakeCoordinator(made), TableCopy()
    until_equal(iter(coordinator.feed()), copy, made)
    other = json.loads(json.dumps(copy.cursor))
    other["shards"]["0"]["lineage"] = "another"
    changes = list(coordinator.feed(cursor=other, follow=False))
    assert {bucket for change in changes for bucket in change.reset_buckets} == {0, 1}


def test_a_cursor_is_kept_in_a_file_whole(tmp_path):
    path = tmp_path / "cursor"
    assert load_cursor(path) is None
    save_cursor(path, {"model": "m"})
    assert load_cursor(path) == {"model": "m"}
    assert list(tmp_path.iterdir()) == [path]
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(DamagedData, match=str(path)):
            load_cursor(path)


def test_the_feed_of_a_shard_that_stays_away_ends_naming_it(made):
    coordinator = FakeCoordinator(made)
    coordinator.job.nodes = {number: node for number, node in made.nodes.items() if number != 1}
    feed = coordinator.feed()
    feed._what = replace(feed._what, patience_seconds=0.2)
    with pytest.raises(Unavailable, match="shard 1 is not there"):
        list(feed)
