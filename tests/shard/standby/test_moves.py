"""A standby follows its shard while slices move, and takes its place as the cluster decided."""

from __future__ import annotations

import threading

import pytest
import torch

from ps_server.log.recovery import recover
from ps_server.shard.standby import log_feed
from tests.shard.durability.test_replay import OPTIMIZERS
from tests.shard.reshard.moving import job, spec_of
from tests.shard.reshard.moving_worker import Worker, assert_same, undisturbed
from tests.shard.standby.support import NEVER, OFTEN, follower
from tests.support.length import few, paired
from tests.support.shards import wait_until

HERE, THERE, BACK = [0, 0, 1, 1, 0], [0, 1, 0, 0, 1], [0, 0, 1, 0, 0]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Several blocks and segments, also of a model of some bytes."""
    monkeypatch.setattr("ps_server.state.blocks.BLOCK_BYTES", 40)
    monkeypatch.setattr("ps_server.log.segments.SEGMENT_BYTES", 1 << 15)
    monkeypatch.setattr("ps_server.log.record.MESSAGE_BYTES", 1 << 11)
    monkeypatch.setattr("ps_server.shard.times.SNAPSHOT_LOOK_SECONDS", 0.001)


def assert_followed(following, made, path):
    """The standby of shard 0 has its bits, in memory and on its disk."""
    following.reach(made.nodes[0])
    published, give_back = made.nodes[0].take(made.model(0))
    assert torch.equal(following.values, published.region.data)
    assert following.model().shard_map == made.maps["model"]
    assert following.model().tracker.persisted_state() == made.model(0).tracker.persisted_state()
    following.end()
    following.loop.run(following.storage.give_up_snapshots())
    again = recover(following.storage.kept[0], log_goes_on=True)
    assert torch.equal(again.models["model"].replica.region.data, published.region.data)
    give_back()


@pytest.mark.parametrize(("optimizer", "rule"), few(paired(list(OPTIMIZERS), [NEVER, OFTEN]), 3))
def test_a_standby_has_the_same_bits_through_moves(tmp_path, optimizer, rule):
    spec = spec_of(optimizer, **OPTIMIZERS[optimizer])
    with job(spec, HERE, 2, path=tmp_path) as made, follower(tmp_path / "b", rule) as following:
        following.begin(made.nodes[0])
        worker = Worker(made)
        for places in (THERE, [1] * 5, BACK):
            worker.train(3)
            made.move(places)
            worker.open()
        worker.train(3)
        worker.end()
        assert_followed(following, made, tmp_path / "b")


@pytest.mark.parametrize("holds", [True, False])
def test_a_standby_that_takes_the_place_before_the_shard_heard_goes_on_as_was_decided(tmp_path, holds):
    spec = spec_of("RMSprop")
    with job(spec, HERE, 2, path=tmp_path) as made, follower(tmp_path / "b") as following:
        following.begin(made.nodes[0])
        worker = Worker(made)
        worker.train(3)
        wait_until(lambda: bool(made.nodes[0].words) and made.nodes[0].words[-1].directory != "")
        values, wanted = made.values(), made.next_map(THERE)
        made.prepare_all(wanted)
        # It is answered when the standby has it: the process that serves shard 0 from now on can do both.
        following.reach(made.nodes[0])  # in its log; a moment later in its model
        assert following.model().pending.shard_map == wanted
        following.end()
        following.loop.run(following.storage.close(snapshot=False))
        if holds:
            made.maps["model"] = wanted
        made.moving = ""
        made.start(0, tmp_path / "b")
        made.show()
        if not holds:
            made.abort()
        assert_same(made.values(), values)
        made.model(1, made.maps["model"].epoch)
        worker.open()
        worker.train(2)
        assert_same(made.values(), undisturbed(spec, 5)[0])
        worker.end()


def test_a_standby_that_comes_while_slices_move_waits_until_they_have(tmp_path):
    with job(spec_of(), HERE, 2, path=tmp_path, rule=OFTEN) as made, follower(tmp_path / "b") as following:
        worker = Worker(made)
        while (live := made.nodes[0].log._segments.live()) and live[0].first == 1:
            worker.train(5)
        wanted = made.next_map(THERE)
        made.prepare_all(wanted)
        following.begin(made.nodes[0])
        assert "its standby copies the state then" in str(following.ended())
        made.commit(wanted)
        following.begin(made.nodes[0])
        assert_followed(following, made, tmp_path / "b")


def test_a_copy_during_which_slices_moved_is_not_used(tmp_path, monkeypatch):
    copying, go_on = threading.Event(), threading.Event()
    with job(spec_of(), HERE, 2, path=tmp_path, rule=OFTEN) as made, follower(tmp_path / "b") as following:
        worker = Worker(made)
        while (live := made.nodes[0].log._segments.live()) and live[0].first == 1:
            worker.train(5)
        copy_model = log_feed._copy_model

        async def slowly(context, model):
            copy_block = model.copy_block

            async def blocks_slowly(block, into):
                copying.set()
                await log_feed.to_thread(go_on.wait, 60)
                return await copy_block(block, into)

            # Not before: a snapshot copies blocks, too.
            model.copy_block = blocks_slowly
            await copy_model(context, model)

        monkeypatch.setattr(log_feed, "_copy_model", slowly)
        following.begin(made.nodes[0])
        assert copying.wait(60)
        made.move(THERE)
        go_on.set()
        assert "slices moved during the copy" in str(following.ended())
        following.begin(made.nodes[0])
        assert_followed(following, made, tmp_path / "b")
