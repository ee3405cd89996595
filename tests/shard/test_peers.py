"""A shard asks another one about a round, however often that is away, not ready or in error. Costs 1 s."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest

from ps_protocol.cluster.view import ClusterView, Member, Role
from ps_protocol.errors import InvalidRequest, ModelMoved, PsError, Unavailable
from ps_protocol.model.spec import Consistency, Mode
from ps_protocol.rpc.channel import open_async_channel
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.v1 import shard_pb2_grpc
from ps_server.consistency import Position
from ps_server.serving.rpc_errors import translated
from ps_server.shard.peers import ShardPeers
from tests.support.loops import in_loop
from tests.support.shards import refused_as, running_shard, start

ASKED = (1, "model", 3, Position(2, 7))


class Other(shard_pb2_grpc.ShardServicer):
    """Answers what it was told to, one after another, and the last for ever."""

    def __init__(self, *answers: float | PsError | None) -> None:
        self.answers = list(answers)
        self.requests: list[pb.RoundNormRequest] = []

    async def GetRoundNorm(self, request: pb.RoundNormRequest, context: grpc.aio.ServicerContext) -> pb.RoundNormReply:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        async with translated(context):
            if isinstance(answer, PsError):
                raise answer
        return pb.RoundNormReply(squared_norm=answer)


@dataclass
class Cluster:
    peers: ShardPeers = field(init=False)
    view: ClusterView = field(default_factory=ClusterView)
    opened: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        def opening(address: str) -> grpc.aio.Channel:
            self.opened.append(address)
            return open_async_channel(address)

        self.peers = ShardPeers(lambda: self.view, opening)

    def shows(self, address: str) -> None:
        self.view = ClusterView(1, members=(Member(Role.SHARD, 1, 5, address),))


@asynccontextmanager
async def serving(other: Other) -> AsyncIterator[str]:
    server = grpc.aio.server()
    shard_pb2_grpc.add_ShardServicer_to_server(other, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_server.shard.times.RETRY_SECONDS", 0.01)


def run(test: Callable[[], object]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]


@in_loop
async def test_the_answer_of_a_shard_is_its_part_of_the_round_asked_for() -> None:
    cluster, other = Cluster(), Other(2.5)
    async with serving(other) as address:
        cluster.shows(address)
        assert [await cluster.peers.round_norm(*ASKED) for _ in range(2)] == [2.5, 2.5]
        assert cluster.opened == [address], "one channel for all questions"
        await cluster.peers.close()
    (first, _) = other.requests
    assert (first.model, first.epoch, first.position.phase, first.position.clock) == ("model", 3, 2, 7)


@in_loop
async def test_a_connection_is_made_ahead_and_what_prevents_it_is_told() -> None:
    cluster, other = Cluster(), Other(0.0)
    with pytest.raises(Unavailable, match="shard 1 is away"):
        await cluster.peers.connect(1, "model")
    async with serving(other) as address:
        cluster.shows(address)
        with pytest.raises(PsError, match=f"shard 1 at {address}"):  # it has no such call
            await cluster.peers.connect(1, "model")
        assert await cluster.peers.round_norm(*ASKED) == 0.0
        assert cluster.opened == [address], "the channel is there already"
        await cluster.peers.close()


def test_it_asks_again_until_the_shard_knows(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    moved = ModelMoved("the model is elsewhere", shard="1")

    async def test() -> None:
        cluster, other = Cluster(), Other(None, moved, moved, -1.0, None, 0.0)
        async with serving(other) as address:
            cluster.shows(address)
            assert await cluster.peers.round_norm(*ASKED) == 0.0
            await cluster.peers.close()
        assert len(other.requests) == 6

    run(test)
    assert ["the model is elsewhere" in text for text in caplog.messages] == [True, False]
    assert "negative squared norm" in caplog.messages[1]


@in_loop
async def test_a_shard_that_is_away_is_waited_for_and_found_at_its_next_address() -> None:
    cluster, first, then = Cluster(), Other(1.0), Other(4.0)
    asking = asyncio.create_task(cluster.peers.round_norm(*ASKED))
    await asyncio.sleep(0.03)  # time in which the other is away
    assert cluster.opened == []
    async with serving(first) as address:
        cluster.shows(address)
        assert await asking == 1.0
    asking = asyncio.create_task(cluster.peers.round_norm(*ASKED))
    await asyncio.sleep(0.03)  # time in which the other is away
    async with serving(then) as address:
        cluster.shows(address)
        assert await asking == 4.0
        await cluster.peers.close()
    assert len(cluster.opened) == 2


def test_a_model_whose_gradients_are_not_clipped_over_shards_has_no_norm_to_tell() -> None:
    with running_shard({0: 1}, Consistency(Mode.SYNC)) as shard:
        start(shard)
        with refused_as(InvalidRequest):
            shard_pb2_grpc.ShardStub(shard.channel).GetRoundNorm(pb.RoundNormRequest(model="model"), timeout=60)
