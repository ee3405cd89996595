"""A standby follows a shard: by the log alone, by a copy where that is not enough, and it can be read from its disk."""

from __future__ import annotations

import threading

import grpc
import pytest
import torch

from ps_protocol import PROTOCOL_VERSION
from ps_protocol.errors import InvalidRequest, Unavailable
from ps_protocol.v1 import shard_pb2 as pb
from ps_server.log.folder import DataFolder
from ps_server.log.recovery import recover
from ps_server.shard.config import Acknowledge
from ps_server.shard.standby import log_feed
from tests.shard.durability.test_replay import OPTIMIZERS
from tests.shard.standby.support import NEVER, OFTEN, follower, primary
from tests.support.length import choose, paired
from tests.support.shards import (
    StubStream,
    flat,
    gradients,
    refused_as,
    running_shard,
    simple_spec,
    start,
    wait_until,
    whole_map,
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Several blocks, segments and pieces, also of a model of some bytes."""
    monkeypatch.setattr("ps_server.state.blocks.BLOCK_BYTES", 40)
    monkeypatch.setattr("ps_server.log.segments.SEGMENT_BYTES", 1 << 15)
    monkeypatch.setattr("ps_server.log.record.MESSAGE_BYTES", 1 << 11)
    monkeypatch.setattr("ps_server.log.reader.PIECE_BYTES", 300)
    monkeypatch.setattr("ps_server.shard.times.SNAPSHOT_LOOK_SECONDS", 0.001)


def held(shard, model):
    published, give_back = shard.take(model)
    data = published.region.data.clone()
    give_back()
    return data


def train(shard, model, steps, first=1, stream=None):
    stream = stream or StubStream(shard)
    for step in range(first, first + steps):
        stream.exchange(flat(model.layout, *gradients(model, step)))
    return stream


def train_until_cut(shard, model):
    """So many steps that the log does not begin with record 1 any more."""
    stream = StubStream(shard)
    step = 0
    while segments(shard)[0] == 1:
        step += 1
        stream.exchange(flat(model.layout, *gradients(model, step)))
    stream.end()
    return step


def segments(shard):
    return [segment.first for segment in shard.log._segments.live()] or [1]


def assert_same(following, shard, model, path):
    """The follower has the shard's bits, in memory and on its disk."""
    following.reach(shard)
    assert torch.equal(following.values, held(shard, model))
    assert following.model().tracker.persisted_state() == model.tracker.persisted_state()
    following.end()
    following.loop.run(following.storage.give_up_snapshots())
    folder = following.storage.kept[0]
    again = recover(folder, log_goes_on=True)
    assert again.number == shard.log.whole
    assert torch.equal(again.models["model"].replica.region.data, held(shard, model))


@pytest.mark.parametrize(("optimizer", "rule"), paired(list(OPTIMIZERS), [NEVER, OFTEN]))
def test_a_standby_there_from_the_beginning_has_the_same_bits(tmp_path, optimizer, rule):
    with primary(tmp_path / "a") as shard, follower(tmp_path / "b", rule) as following:
        following.begin(shard)
        model, _ = start(shard, optimizer=f"torch.optim.{optimizer}", **OPTIMIZERS[optimizer])
        train(shard, model, 20).end()
        shard.covered()
        assert_same(following, shard, model, tmp_path / "b")


def test_a_standby_knows_each_worker_of_a_combined_push(tmp_path):
    with primary(tmp_path / "a") as shard, follower(tmp_path / "b") as following:
        shard.set_view({0: 1, 1: 2})
        following.begin(shard)
        model, _ = start(shard)
        whole = [pb.PushContribution(worker=pb.WorkerId(rank=1, incarnation=2), sequence=4, clock=1)]
        StubStream(shard).exchange(flat(model.layout, *gradients(model, 1)), weight=2.0, contributions=whole)
        shard.covered()
        assert_same(following, shard, model, tmp_path / "b")
        standings = following.model().tracker.persisted_state().standings
        assert [(each.worker.rank, each.last_sequence, each.position) for each in standings] == [
            (0, 1, (0, 1)),
            (1, 4, (0, 1)),
        ]


@pytest.mark.parametrize("optimizer", choose(list(OPTIMIZERS), ["Adam"]))
def test_a_standby_that_comes_late_copies_under_training(tmp_path, optimizer):
    with primary(tmp_path / "a", rule=OFTEN) as shard, follower(tmp_path / "b") as following:
        model, _ = start(shard, optimizer=f"torch.optim.{optimizer}", **OPTIMIZERS[optimizer])
        step = train_until_cut(shard, model)
        done = threading.Event()

        def push():
            stream, number = StubStream(shard), step
            while not done.is_set():
                number += 1
                train(shard, model, 1, number, stream)
            stream.end()

        worker = threading.Thread(target=push)
        worker.start()
        following.begin(shard)
        shard.covered()
        done.set()
        worker.join()
        assert_same(following, shard, model, tmp_path / "b")


def test_a_model_placed_after_the_copy_began_is_not_missed(tmp_path):
    with primary(tmp_path / "a", rule=OFTEN) as shard, follower(tmp_path / "b") as following:
        model, _ = start(shard)
        train_until_cut(shard, model)
        following.begin(shard)
        shard.place(whole_map(simple_spec((7,), name="other")))
        following.reach(shard)
        assert sorted(following.storage.recovered) == ["model", "other"]


def test_a_copy_during_which_values_were_loaded_is_not_used(tmp_path, monkeypatch):
    copying, go_on = threading.Event(), threading.Event()
    copy_model = log_feed._copy_model

    async def slowly(context, model):
        await copy_model(context, model)
        copying.set()
        await log_feed.to_thread(go_on.wait, 60)

    monkeypatch.setattr(log_feed, "_copy_model", slowly)
    with primary(tmp_path / "a", rule=OFTEN) as shard, follower(tmp_path / "b") as following:
        model, _ = start(shard, momentum=0.9)
        train_until_cut(shard, model)
        following.begin(shard)
        assert copying.wait(60)

        async def load():
            async with model.save() as (_, entries):
                doubled = [(key, tensor * 2) for key, tensor in entries]
            await model.values.load(None, doubled, only_first=False)

        shard.loop.run(load())
        go_on.set()
        assert "loaded during the copy" in str(following.ended())
        assert following.follower.incarnation == 0
        # The next try gets it.
        following.begin(shard)
        assert_same(following, shard, model, tmp_path / "b")


def test_a_standby_that_was_away_goes_on_where_it_was(tmp_path):
    with primary(tmp_path / "a") as shard:
        with follower(tmp_path / "b") as following:
            following.begin(shard)
            model, _ = start(shard)
            stream = train(shard, model, 10)
            following.reach(shard)
        train(shard, model, 10, 11, stream).end()
        with follower(tmp_path / "b") as following:
            following.begin(shard)
            following.reach(shard)
            assert not (tmp_path / "b" / "shard-0" / "set-aside").exists()
            assert_same(following, shard, model, tmp_path / "b")


def test_what_another_line_of_history_has_left_is_set_aside(tmp_path):
    """Two shards had the same beginning; then one was lost with a push of its own, and the other went on."""
    with primary(tmp_path / "a") as shard, follower(tmp_path / "b") as following:
        following.begin(shard)
        model, _ = start(shard)
        stream = train(shard, model, 5)
        following.reach(shard)
        following.end()
        train(shard, model, 1, 6, stream).end()
        known = model.layout.shard_map
    with primary(tmp_path / "b", incarnation=101) as shard, follower(tmp_path / "a") as following:
        model = shard.place(known)
        train(shard, model, 3, 7).end()
        following.begin(shard, incarnation=101)
        assert_same(following, shard, model, tmp_path / "a")
        aside = tmp_path / "a" / "shard-0" / "set-aside"
        assert list((aside / "log").glob("[0-9]*.log"))


def test_a_standby_that_has_only_what_its_new_primary_had_goes_on_without_a_copy(tmp_path):
    with primary(tmp_path / "a") as shard, follower(tmp_path / "b") as following:
        following.begin(shard)
        model, _ = start(shard)
        train(shard, model, 5).end()
        following.reach(shard)
        known = model.layout.shard_map
    with primary(tmp_path / "b", incarnation=101) as shard, follower(tmp_path / "a") as following:
        model = shard.place(known)
        train(shard, model, 3, 7).end()
        following.begin(shard, incarnation=101)
        assert_same(following, shard, model, tmp_path / "a")
        assert not (tmp_path / "a" / "shard-0" / "set-aside").exists()


def test_a_copy_that_was_interrupted_leaves_a_directory_that_starts_over(tmp_path, monkeypatch):
    copying = threading.Event()
    receive = "ps_server.shard.standby.follower.LogFollower._block"

    async def stuck(*_):
        copying.set()
        await log_feed.asyncio.sleep(60)

    with primary(tmp_path / "a", rule=OFTEN) as shard:
        model, _ = start(shard)
        train_until_cut(shard, model)
        with monkeypatch.context() as patched, follower(tmp_path / "b") as following:
            patched.setattr(receive, stuck)
            following.begin(shard)
            assert copying.wait(60)
        with follower(tmp_path / "b") as following:
            assert following.storage.recovered == {}
            assert following.follower.incarnation == 0
            following.begin(shard)
            assert_same(following, shard, model, tmp_path / "b")


def test_a_plain_shard_does_not_take_an_unfinished_copy_for_state(tmp_path):
    folder = DataFolder.open(tmp_path, 0)
    folder.belongs_to(5)
    folder.begin_copy()
    (folder.path / "snapshots").mkdir()
    (folder.path / "snapshots" / "half").touch()
    folder.close()
    folder = DataFolder.open(tmp_path, 0)
    assert (folder.identity.incarnation, folder.identity.copy) == (0, "")
    assert not (folder.path / "snapshots").exists()
    folder.close()


def test_the_log_keeps_what_its_standby_has_not_read(tmp_path):
    with primary(tmp_path / "a", rule=OFTEN) as shard, follower(tmp_path / "b") as following:
        model, _ = start(shard)
        following.begin(shard)
        train(shard, model, 3).end()
        following.reach(shard)
        following.end()
        after = following.follower.number
        stream, step = StubStream(shard), 3
        while len(segments(shard)) < 3:
            step += 1
            train(shard, model, 1, step, stream)
        stream.end()
        assert segments(shard)[0] <= after + 1
        following.begin(shard)
        assert_same(following, shard, model, tmp_path / "b")
        assert not (tmp_path / "b" / "shard-0" / "set-aside").exists()


def test_a_standby_that_is_too_slow_is_dropped_and_copies(tmp_path):
    with (
        primary(tmp_path / "a", rule=type(OFTEN)(seconds=0.01, log_bytes=1 << 15)) as shard,
        follower(tmp_path / "b") as following,
    ):
        model, _ = start(shard)
        following.begin(shard)
        train(shard, model, 3).end()
        following.reach(shard)
        following.end()
        train_until_cut(shard, model)
        following.begin(shard)
        assert_same(following, shard, model, tmp_path / "b")
        assert (tmp_path / "b" / "shard-0" / "set-aside").exists()


def test_how_far_a_standby_is_behind_is_told_while_there_is_one(tmp_path):
    with primary(tmp_path / "a", Acknowledge.AFTER) as shard, follower(tmp_path / "b") as following:
        model, _ = start(shard)
        assert shard.feed.lag is None
        following.begin(shard)
        stream = train(shard, model, 2)
        following.reach(shard)
        wait_until(lambda: shard.feed.lag == 0)
        # Nothing goes out while nobody is told that something was appended.
        shard.log.on_append = None
        stream.push(flat(model.layout, *gradients(model, 3)))
        wait_until(lambda: shard.feed.lag == 1)
        following.end()
        wait_until(lambda: shard.feed.lag is None)
        stream.cancel()


def test_a_push_is_answered_when_its_standby_has_it(tmp_path):
    with primary(tmp_path / "a", Acknowledge.AFTER) as shard, follower(tmp_path / "b") as following:
        model, _ = start(shard)
        following.begin(shard)
        shard.covered()
        stream = train(shard, model, 2)
        assert following.follower.number >= 4
        # A standby that is silent is waited for until it is no member any more.
        shard.log.on_append = None
        answered = threading.Event()
        pushing = threading.Thread(target=lambda: (train(shard, model, 1, 3, stream), answered.set()))
        pushing.start()
        wait_until(lambda: model.tracker.version == 3)
        assert not answered.wait(0.2)
        shard.look(7)
        assert not answered.wait(0.1)
        shard.look(None)
        assert answered.wait(60)
        pushing.join()
        assert shard.words[-1].directory == ""
        assert isinstance(following.ended(), Unavailable)
        stream.end()


def test_a_standby_of_the_wrong_shard_is_refused(tmp_path):
    with primary(tmp_path / "a") as shard, follower(tmp_path / "b") as following:
        following.follower.shard = 1
        following.begin(shard)
        error = following.ended()
        assert isinstance(error, InvalidRequest)
        assert (
            "a standby of another shard; shard: 0; expected: a standby of shard 0; actual: a standby of shard 1"
            in str(error)
        )


@pytest.mark.parametrize("number", [0, 1])
def test_a_shard_is_followed_as_the_incarnation_that_holds_the_place(tmp_path, number):
    """Another one may have the address of a shard that has ended: its standby asks again."""
    with primary(tmp_path / "a") as shard, follower(tmp_path / "b") as following:
        following.follower.shard = number
        following.begin(shard, incarnation=99)
        error = following.ended()
        assert isinstance(error, Unavailable)
        assert "is not followed as incarnation 99" in str(error)


@pytest.mark.parametrize(
    ("incarnation", "kind", "text"),
    [(100, InvalidRequest, "keeps no log that could be followed"), (99, Unavailable, "not followed as incarnation 99")],
)
def test_a_shard_without_a_log_says_so_to_its_own_standby(incarnation, kind, text):
    with running_shard(incarnation=100) as shard, refused_as(kind, text):
        asked = pb.FollowStart(protocol_version=PROTOCOL_VERSION, primary=incarnation)
        with grpc.insecure_channel(shard.address) as channel:
            follow = channel.stream_stream("/ps_protocol.v1.Shard/Follow")
            next(follow(iter([pb.FollowRequest(start=asked).SerializeToString()]), timeout=60.0))
