"""First values are told to workers once a takeover does not lose them. One pair in this process: about a second."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from ps_protocol.v1 import shard_pb2, shard_pb2_grpc
from ps_server.shard.config import Acknowledge
from ps_server.shard.step.model import ShardModel
from tests.shard.standby.support import Following, Primary, follower, primary
from tests.support.shards import StubStream, flat, load, simple_spec, wait_until, whole_map


@contextmanager
def blocked(following: Following):
    """The standby acknowledges nothing inside the block."""
    held = threading.Event()

    async def block() -> None:
        following.follower._executor.submit(lambda: held.wait(60), 1 << 62)

    following.loop.run(block())
    try:
        yield
    finally:
        held.set()


@contextmanager
def followed(path, acknowledge: Acknowledge = Acknowledge.AFTER):
    """A shard whose model has no values yet, and its standby, which has everything."""
    with primary(path / "a", acknowledge) as shard, follower(path / "b") as following:
        model = shard.place(whole_map(simple_spec()))
        following.begin(shard)
        following.reach(shard)
        shard.covered()
        yield shard, following, model


def first(model: ShardModel, value: float) -> bytes:
    return flat(model.layout, *(torch.full(span.shape, value) for span in model.layout.slices))


def upload(shard: Primary, model: ShardModel, value: float) -> bool:
    return load(shard, model, first(model, value), only_if_uninitialised=True).written


def told_by_status(shard: Primary) -> bool:
    stub = shard_pb2_grpc.ShardStub(shard.channel)
    return stub.GetModel(shard_pb2.GetModelRequest(model="model")).initialised


def told_by_a_stream(shard: Primary) -> bool:
    stream = StubStream(shard, 1, incarnation=2)
    stream.end()
    return stream.opened.initialised


@pytest.mark.parametrize("told", [told_by_status, told_by_a_stream])
def test_first_values_that_the_standby_does_not_have_are_not_told(told, tmp_path):
    with followed(tmp_path) as (shard, following, model), ThreadPoolExecutor() as threads:
        shard.set_view({0: 1, 1: 2})
        assert not told(shard)
        with blocked(following):
            uploading = threads.submit(upload, shard, model, 1.0)
            wait_until(lambda: bool(shard.replication._waiting))
            assert not told(shard)
        assert uploading.result()
        assert told(shard)


def test_an_upload_that_found_values_waits_for_the_standby_as_the_one_that_brought_them(tmp_path):
    with followed(tmp_path) as (shard, following, model), ThreadPoolExecutor() as threads:
        with blocked(following):
            uploading = threads.submit(upload, shard, model, 1.0)
            wait_until(lambda: len(shard.replication._waiting) == 1)
            # The first worker was lost, and the next one uploads.
            shard.set_view({0: 1, 1: 2})
            again = threads.submit(
                load,
                shard,
                model,
                first(model, 2.0),
                only_if_uninitialised=True,
                worker=shard_pb2.WorkerId(rank=1, incarnation=2),
            )
            wait_until(lambda: len(shard.replication._waiting) == 2)
            assert not again.done()
        assert uploading.result()
        assert not again.result().written
        following.reach(shard)
        assert torch.equal(following.values, shard.model()._applier.replica.region.data)


def test_first_values_whose_upload_broke_off_are_told_once_the_standby_has_them(tmp_path):
    with followed(tmp_path) as (shard, following, model):
        with blocked(following):
            stub = shard_pb2_grpc.ShardStub(shard.channel)
            worker = shard_pb2.WorkerId(rank=0, incarnation=1)
            header = shard_pb2.LoadHeader(model="model", with_region=True, worker=worker, only_if_uninitialised=True)
            chunk = shard_pb2.Chunk(position=0, payload=first(model, 1.0))
            requests = [shard_pb2.LoadRequest(header=header), shard_pb2.LoadRequest(chunk=chunk)]
            uploading = stub.Load.future(iter(requests))
            wait_until(lambda: bool(shard.replication._waiting))
            uploading.cancel()
            wait_until(lambda: not shard.replication._waiting)
            assert not told_by_status(shard)
        wait_until(lambda: told_by_status(shard))


def test_what_was_told_stays_told_when_the_standby_is_lost_and_another_begins(tmp_path):
    with followed(tmp_path) as (shard, following, model):
        assert upload(shard, model, 1.0)
        following.end()
        wait_until(lambda: not shard.feed.followed)
        assert told_by_status(shard)

        async def begins() -> None:
            shard.replication.follows("another")

        shard.loop.run(begins())
        assert told_by_status(shard)


def test_where_a_push_is_acknowledged_before_the_standby_has_it_first_values_are_told_so_too(tmp_path):
    with followed(tmp_path, Acknowledge.BEFORE) as (shard, following, model), blocked(following):
        assert upload(shard, model, 1.0)
        assert told_by_status(shard)
