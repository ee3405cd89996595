"""Memory and log for slices that come, made ahead; memory of those that left, given back. Two seconds, in process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.convert.model import shard_map_to_pb
from tests.shard.reshard.moving import job, spec_of
from tests.shard.reshard.moving_worker import Worker, assert_same, undisturbed
from tests.support.shards import wait_until

HERE, THERE = [0, 0, 1, 1, 0], [0, 1, 2, 0, 2]

pytestmark = pytest.mark.usefixtures("small_blocks")


def test_room_that_is_made_ahead_changes_nothing_and_is_used_when_slices_come():
    with job(spec_of(momentum=0.9), HERE) as made:
        worker = Worker(made)
        worker.train(2)
        wanted, values = made.next_map(THERE), made.values()
        for number, node in made.nodes.items():
            node.stub.MakeRoom(pb.MakeRoomRequest(models=[shard_map_to_pb(wanted)]), timeout=30)
            # One that does not follow is left to those who stage it.
            later = replace(wanted, epoch=wanted.epoch + 1)
            node.stub.MakeRoom(pb.MakeRoomRequest(models=[shard_map_to_pb(later)]), timeout=30)
            assert made.model(number).layout.shard_map.epoch == 1
        worker.train(1)
        moved = made.values()
        assert set(moved) == set(values)
        made.move(THERE)
        assert_same(made.values(), moved)
        worker.open()
        worker.train(1)
        worker.end()


def test_memory_of_slices_that_left_is_given_back_when_the_move_is_over(monkeypatch):
    monkeypatch.setattr("ps_server.shard.reshard.resharding.REST_SECONDS", 0.0)
    with job(spec_of(momentum=0.9), [0, 0, 0, 1, 0]) as made:
        worker = Worker(made)
        worker.train(2)
        values = made.values()
        made.move([0, 2, 2, 1, 0])
        model = made.model(0)
        wait_until(lambda: model._working.replica.region.unused_bytes == 0)
        assert_same(made.values(), values)
        worker.open()
        worker.train(2)
        wanted, _ = undisturbed(spec_of(momentum=0.9), 4)
        assert_same(made.values(), wanted, exact=False)
        worker.end()
