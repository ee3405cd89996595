"""What the clients of one shard may take: feeds, connections before their token. Each refusal is counted."""

from __future__ import annotations

import asyncio
import socket

import grpc
import pytest

from ps_protocol.errors import Unavailable
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.v1 import shard_pb2_grpc
from ps_server.limits import ANSWERS, FEEDS, PEER_FEEDS, SIDE_HANDSHAKES, TOKEN_TIME, LimitCounts, ShardLimits
from ps_server.shard import byte_budget
from ps_server.shard.byte_budget import ByteBudget
from ps_server.shard.config import SideChannelConfig
from tests.support.shards import error_of, running_shard, start, wait_until
from tests.support.side_channels import BULK, HURRIED, Worker
from tests.support.tables import start_with, table_spec

FOLLOWED = pb.FeedRequest(model="model", table=0, follow=True)


@pytest.mark.parametrize(
    ("limits", "name", "flag"),
    [
        (ShardLimits(max_feeds=2), FEEDS, "--max-feeds"),
        (ShardLimits(max_peer_feeds=2), PEER_FEEDS, "--max-peer-feeds"),
    ],
    ids=["in all", "of one host"],
)
def test_one_reader_of_changes_too_many_is_refused(limits, name, flag):
    with running_shard(limits=limits) as shard:
        start_with(shard, table_spec())
        counts = shard.registry.context.limit_counts
        stub = shard_pb2_grpc.ShardStub(shard.channel)
        readers = [stub.Feed(FOLLOWED) for _ in range(2)]
        for reader in readers:
            next(reader)
        with pytest.raises(grpc.RpcError) as refused:
            next(stub.Feed(FOLLOWED))
        error = error_of(refused.value)
        assert isinstance(error, Unavailable)
        assert "readers of changes" in error.message
        assert flag in error.remedy
        assert counts.counts[name] == 1
        readers[0].cancel()

        def admitted() -> bool:
            another = stub.Feed(FOLLOWED)
            try:
                next(another)
                return True
            except grpc.RpcError:
                return False
            finally:
                another.cancel()

        wait_until(admitted)
        readers[1].cancel()


def test_an_answer_that_found_no_room_is_counted(monkeypatch):
    monkeypatch.setattr(byte_budget, "PATIENCE_SECONDS", dict.fromkeys(byte_budget.PATIENCE_SECONDS, 0.01))
    counts = LimitCounts()

    async def body() -> None:
        answers = ByteBudget(100, counts)
        async with answers.taken("a", 50):
            with pytest.raises(Unavailable):
                async with answers.taken("a", 50):
                    pass

    asyncio.run(body())
    assert counts.counts[ANSWERS] == 1


def test_connections_closed_for_newer_ones_are_counted():
    with running_shard(side_channel_config=SideChannelConfig(max_handshakes=2)) as shard:
        start(shard)
        counts = shard.registry.context.limit_counts
        worker = Worker(shard, BULK)
        place = shard.address.rpartition(":")[0], worker.offered.port
        strangers = [socket.create_connection(place) for _ in range(3)]
        strangers[0].settimeout(60)
        assert strangers[0].recv(1) == b""
        assert counts.counts[SIDE_HANDSHAKES] == 1
        worker.confirmed()  # closes another, and is not held up by the last
        worker.close()
        for stranger in strangers:
            stranger.close()


def test_a_connection_without_a_token_in_time_is_counted():
    with running_shard(side_channel_config=HURRIED) as shard:
        start(shard)
        worker = Worker(shard, BULK)
        assert worker.connect().ended()
        wait_until(lambda: shard.registry.context.limit_counts.counts[TOKEN_TIME] == 1)
        worker.close()
