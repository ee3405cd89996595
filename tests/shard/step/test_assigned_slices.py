"""A load of some slices: these are replaced, the others stay, and a log brings both back."""

from __future__ import annotations

import pytest
import torch

from ps_protocol.errors import InvalidRequest, StateLost
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.v1 import shard_pb2_grpc
from ps_server.log.entries import Loaded, MemoryLog
from tests.support.shards import (
    StubStream,
    gradients,
    refused_as,
    running_shard,
    simple_spec,
    start,
    whole_map,
)

SHAPES = ((4, 3), (5,))


class LoadsLog(MemoryLog):
    """Keeps what was loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[torch.Tensor] = []

    def append(self, entry):
        if isinstance(entry, Loaded):
            self.loads.append(entry.region.data.clone())
        return super().append(entry)


def assign(shard, slices, payload: bytes) -> pb.LoadReply:
    header = pb.LoadHeader(model="model", worker=pb.WorkerId(rank=0, incarnation=1), with_region=True, slices=slices)
    messages = [pb.LoadRequest(header=header), pb.LoadRequest(chunk=pb.Chunk(payload=payload))]
    return shard_pb2_grpc.ShardStub(shard.channel).Load(iter(messages))


def test_slices_that_are_assigned_are_replaced_and_the_others_stay():
    log = LoadsLog()
    with running_shard(log=log) as shard:
        model, _ = start(shard, *SHAPES)
        stream = StubStream(shard)
        stream.exchange(b"".join(bytes(64) for _ in gradients(model, 1)))
        before = shard.take(model)[0].region.slice(0).clone()
        assert assign(shard, [1], torch.arange(5.0).numpy().tobytes()).written
        region = shard.take(model)[0].region
        assert torch.equal(region.slice(0), before)
        assert region.slice(1).tolist() == [0, 1, 2, 3, 4]
        # The record is whole, so that a replay needs nothing else.
        assert torch.equal(log.loads[-1], region.data)
        status = shard_pb2_grpc.ShardStub(shard.channel).GetModel(pb.GetModelRequest(model="model"))
        assert status.assigned == 1
        stream.end()


@pytest.mark.parametrize("slices", [[2], [1, 1]])
def test_slices_that_do_not_exist_or_come_twice_are_refused(slices):
    with running_shard() as shard:
        start(shard, *SHAPES)
        with refused_as(InvalidRequest):
            assign(shard, slices, bytes(20))


def test_nothing_is_assigned_to_a_model_without_values():
    with running_shard() as shard:
        shard.place(whole_map(simple_spec(*SHAPES)))
        with refused_as(StateLost):
            assign(shard, [1], bytes(20))
