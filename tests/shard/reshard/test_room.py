"""Memory and log for slices that come, made ahead; memory of those that left, given back. Three seconds, in process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from ps_protocol.errors import ModelMoved, ModelReleased, PsError, StorageFull, Unavailable
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.convert.model import SHARD_MAP
from ps_server.log.durable import DurableLog
from ps_server.shard import resharding, transfer
from ps_server.shard.peers import ShardPeers
from ps_server.shard.resharding import LogRoom, Resharding
from tests.shard.reshard.moving import Job, job, spec_of
from tests.shard.reshard.moving_worker import Worker, assert_same, undisturbed
from tests.support.shards import error_of, wait_until

HERE, THERE = [0, 0, 1, 1, 0], [0, 1, 2, 0, 2]

pytestmark = pytest.mark.usefixtures("small_blocks")


def test_room_that_is_made_ahead_changes_nothing_and_is_used_when_slices_come():
    with job(spec_of(momentum=0.9), HERE) as made:
        worker = Worker(made)
        worker.train(2)
        wanted, values = made.next_map(THERE), made.values()
        for number, node in made.nodes.items():
            node.stub.MakeRoom(pb.MakeRoomRequest(models=[SHARD_MAP.to_pb(wanted)]), timeout=30)
            # One that does not follow is left to those who stage it.
            later = replace(wanted, epoch=wanted.epoch + 1)
            node.stub.MakeRoom(pb.MakeRoomRequest(models=[SHARD_MAP.to_pb(later)]), timeout=30)
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
    monkeypatch.setattr("ps_server.shard.times.REST_SECONDS", 0.0)
    with job(spec_of(momentum=0.9), [0, 0, 0, 1, 0]) as made:
        worker = Worker(made)
        worker.train(2)
        values = made.values()
        made.move([0, 2, 2, 1, 0])
        model = made.model(0)
        wait_until(lambda: model._applier.replica.region.unused_bytes == 0)
        assert_same(made.values(), values)
        worker.open()
        worker.train(2)
        wanted, _ = undisturbed(spec_of(momentum=0.9), 4)
        assert_same(made.values(), wanted, exact=False)
        worker.end()


def reserved(made: Job) -> list[int]:
    """How many records each shard has room for."""
    return [sum(node.log._reserved.values()) for node in made.nodes.values()]


def make_room(made: Job, places: Sequence[int]) -> None:
    wanted = made.next_map(places)
    for node in made.nodes.values():
        node.stub.MakeRoom(pb.MakeRoomRequest(models=[SHARD_MAP.to_pb(wanted)]), timeout=30)


def test_room_in_the_log_is_held_until_what_comes_is_written_and_what_does_not_come_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with job(spec_of(), HERE, path=tmp_path) as made:
        make_room(made, THERE)
        make_room(made, THERE)
        assert reserved(made) == [2, 2, 2], "what comes, and the decision"
        assert all(max(node.log._reserved) > 1 << 10 for node in made.nodes.values())
        with monkeypatch.context() as full:
            full.setattr(DurableLog, "reserve", FullLog.refuse)
            made.move(THERE)
        wait_until(lambda: reserved(made) == [0, 0, 0])
        make_room(made, HERE)
        monkeypatch.setattr("ps_server.shard.times.REST_SECONDS", 0.0)
        make_room(made, HERE)
        wait_until(lambda: reserved(made) == [0, 0, 0])


class FullLog:
    """Has room for one record."""

    def __init__(self) -> None:
        self.held: list[int] = []

    async def reserve(self, nbytes: int) -> None:
        if self.held:
            raise StorageFull("no room")
        self.held.append(nbytes)

    def release(self, nbytes: int) -> None:
        self.held.remove(nbytes)

    async def refuse(self, _: int) -> None:
        raise StorageFull("no room")


def test_where_there_is_no_room_for_all_none_is_held():
    log: Any = FullLog()
    room = LogRoom(log)
    asyncio.run(room.hold(7))
    asyncio.run(room.hold(8))
    assert log.held == [8]
    with pytest.raises(StorageFull):
        asyncio.run(room.hold(1, 2))
    assert log.held == []
    asyncio.run(room.hold(8))
    assert [room.take(9, 10), room.take(1, 7), room.take(7, 9), room.take(7, 9)] == [None, None, 8, None]
    room.release()
    assert log.held == [8], "it is its taker's"


def test_a_shard_does_not_rest_while_slices_come(monkeypatch: pytest.MonkeyPatch):
    begun, begin, fetch = list[Resharding](), Resharding.__init__, resharding.fetch

    def noted(self: Resharding, *arguments: Any) -> None:
        begin(self, *arguments)
        begun.append(self)

    async def slow(held: Any, wanted: Any, shard: int, members: Any, sources: ShardPeers, block: Any) -> Any:
        before = dict(sources._channels)
        for each in begun:
            each._rested()  # its timer rings in the middle of a transfer that takes long
        await asyncio.sleep(0)
        assert sources._channels == before, "its connections were closed"
        return await fetch(held, wanted, shard, members, sources, block)

    monkeypatch.setattr(Resharding, "__init__", noted)
    monkeypatch.setattr(resharding, "fetch", slow)
    with job(spec_of(), HERE) as made:
        values = made.values()
        make_room(made, THERE)
        made.move(THERE)
        assert_same(made.values(), values)


def test_a_connection_that_is_closed_while_slices_come_is_told_to_the_coordinator(monkeypatch: pytest.MonkeyPatch):
    closed, receive = list[Any](), transfer._Source._next

    async def closing(self: Any, call: Any) -> bytes:
        if not closed:
            closed.append(self)
            await self._channel.close()
        return await receive(self, call)

    monkeypatch.setattr(transfer._Source, "_next", closing)
    with job(spec_of(), HERE) as made:
        values, wanted = made.values(), made.next_map(THERE)
        made.begin_move()
        made.reach()
        # Not answered at all, the job would stay paused until the coordinator's time is up.
        with pytest.raises(grpc.RpcError) as failed:
            made.prepare(1, wanted)
        error = error_of(failed.value)
        assert isinstance(error, Unavailable)
        assert "the connection to shard 0" in error.message
        made.abort()
        made.move(THERE)
        assert_same(made.values(), values)


@pytest.mark.parametrize(("why", "kept"), [(ModelMoved("slices moved"), 1), (ModelReleased("nobody uses it"), 0)])
def test_memory_that_streams_have_reserved_outlives_them_where_the_model_moves(why: PsError, kept: int):
    with job(spec_of(), [0] * 5, 1) as made:
        worker = Worker(made)
        worker.train(2)
        model = made.model(0)
        assert model.pool.spare == 1

        async def leave() -> None:
            model.leave(why)

        made.loop.run(leave())
        wait_until(lambda: model.pool._streams == 0)
        assert model.pool.spare == kept
        assert model.pool.in_use == 0
