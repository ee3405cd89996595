"""Memory of answers: small questions about much do not take more of it than was given."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from ps_protocol.errors import Unavailable
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.v1 import shard_pb2_grpc
from ps_server.consistency import WorkerKey
from ps_server.shard import byte_budget
from ps_server.shard.byte_budget import READERS, ByteBudget
from tests.support.shards import TestShard, refused_as, running_shard, wait_until
from tests.support.tables import RowStream, get_rows, start_with, table_spec


def played(body):
    asyncio.run(asyncio.wait_for(body(), 60))


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(byte_budget, "PATIENCE_SECONDS", dict.fromkeys(byte_budget.PATIENCE_SECONDS, 0.05))


def test_one_client_gets_half_and_all_together_the_whole(impatient):
    async def body():
        answers = ByteBudget(100)
        async with answers.taken("a", 50), answers.taken("b", 30):
            for who, size in (("a", 1), ("b", 21), ("c", 21)):
                with pytest.raises(Unavailable) as refused:
                    async with answers.taken(who, size):
                        pass
                assert "--answer-mb" in refused.value.remedy
            async with answers.taken("c", 20), answers.taken("a", 0):
                assert answers.used_bytes == 100
        assert answers.used_bytes == 0

    played(body)


def test_who_waits_goes_when_there_is_room():
    async def body():
        answers, order = ByteBudget(100), []

        async def ask(who, size):
            async with answers.taken(who, size):
                order.append(who)

        async with answers.taken("first", 50), answers.taken("other", 50):
            waiting = [asyncio.create_task(ask(n, 40)) for n in range(5)]
            await asyncio.sleep(0)
            assert not order
        await asyncio.gather(*waiting)
        assert sorted(order) == list(range(5))
        assert answers.used_bytes == 0

    played(body)


def test_what_is_larger_than_a_share_goes_alone(impatient):
    async def body():
        answers = ByteBudget(100)
        async with answers.taken("a", 10_000), answers.taken("b", 10_000):
            assert answers.used_bytes == 100
            with pytest.raises(Unavailable):
                async with answers.taken("a", 1):
                    pass

    played(body)


def test_a_caller_that_goes_while_it_waits_takes_nothing():
    async def body():
        answers = ByteBudget(100)

        async def ask():
            async with answers.taken("a", 50):
                raise AssertionError("there was no room")

        async with answers.taken("b", 50), answers.taken("c", 50):
            waiting = asyncio.create_task(ask())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        assert answers.used_bytes == 0

    played(body)


def test_many_small_questions_about_wide_rows_take_no_more_than_the_limit(impatient):
    """A question of 8 KB asks for 2 MB, whatever way it comes; who has its share waits, and others do not."""
    ids = np.arange(1024)
    with running_shard({0: 1, 1: 2}) as shard:
        start_with(shard, table_spec(dim=512))
        answers = shard.registry.context.answers
        answers.limit_bytes = 6 << 20
        stub = shard_pb2_grpc.ShardStub(shard.channel)
        calls = (
            lambda: list(stub.GetRows(pb.GetRowsRequest(model="model", ids=ids.tobytes()))),
            lambda: list(stub.Pull(pb.PullRequest(model="model"))),
            lambda: list(stub.Save(pb.SaveRequest(model="model"))),
        )
        with held(shard, READERS, 3 << 20):
            for call in calls:
                with refused_as(Unavailable):
                    call()
            other = RowStream(shard, rank=1, incarnation=2)
            assert other.look_up(ids, 512).shape == (1024, 512)
            other.end()
        wait_until(lambda: answers.used_bytes == 0)
        worker = WorkerKey(0, 1)
        with held(shard, worker, 3 << 20):
            stream = RowStream(shard)
            with refused_as(Unavailable):
                stream.look_up(ids, 512)
            assert get_rows(shard, ids, 512).shape == (1024, 512)
        # What a client has read is given back a moment later.
        for call in calls:
            wait_until(lambda: answers.used_bytes == 0)
            call()
        wait_until(lambda: answers.used_bytes == 0)


@contextmanager
def held(shard: TestShard, who: Hashable, size_bytes: int) -> Iterator[None]:
    taking = shard.registry.context.answers.taken(who, size_bytes)
    shard.loop.run(taking.__aenter__())
    yield
    shard.loop.run(taking.__aexit__(None, None, None))
