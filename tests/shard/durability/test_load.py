"""Load and Save: whole parameters and optimizer state through a real shard."""

from __future__ import annotations

import grpc
import pytest
import torch

from ps_protocol.errors import InvalidRequest, PsError, StateLost
from ps_protocol.model.layout import aligned
from ps_protocol.v1 import common_pb2, shard_pb2_grpc
from ps_protocol.v1 import shard_pb2 as pb
from tests.support.shards import (
    StubStream,
    error_of,
    flat,
    gradients,
    load,
    refused_as,
    running_shard,
    simple_spec,
    start,
    wait_until,
    whole_map,
    writer,
)

ADAM = {"optimizer": "torch.optim.Adam"}


def save(shard):
    stub = shard_pb2_grpc.ShardStub(shard.channel)
    head, *chunks = list(stub.Save(pb.SaveRequest(model="model")))
    payload = b"".join(reply.chunk.payload for reply in chunks)
    assert len(payload) == head.header.payload_bytes
    return head.header, payload


def load_all(shard, header, payload, **fields):
    stub = shard_pb2_grpc.ShardStub(shard.channel)
    fields = {"model": "model", "worker": writer(shard), "with_region": True, "with_state": True} | fields
    head = pb.LoadHeader(state=header.state, **fields)
    return stub.Load(iter([pb.LoadRequest(header=head), pb.LoadRequest(chunk=pb.Chunk(payload=payload))]))


def train(shard, model, seeds):
    stream = StubStream(shard)
    for seed in seeds:
        _, payload = stream.exchange(flat(model.layout, *gradients(model, seed)))
    stream.end()
    return payload


def test_training_continued_from_a_saved_state_is_bitwise_the_training_that_never_stopped():
    with running_shard() as shard:
        model, _ = start(shard, **ADAM)
        train(shard, model, range(3))
        header, payload = save(shard)
        wanted = train(shard, model, range(3, 6))
    assert {state.name for state in header.state} == {"step", "exp_avg", "exp_avg_sq"}
    with running_shard() as shard:
        model = shard.place(whole_map(simple_spec(**ADAM)))
        assert load_all(shard, header, payload).written
        assert train(shard, model, range(3, 6)) == wanted


def test_only_the_first_initial_values_are_taken():
    with running_shard() as shard:
        model, initial = start(shard)
        other = flat(model.layout, *[torch.zeros_like(t) for t in initial])
        assert not load(shard, model, other, only_if_uninitialised=True).written
        assert save(shard)[1] == flat(model.layout, *initial)


def test_a_shard_without_values_says_so_to_a_pull_and_to_a_push():
    with running_shard() as shard:
        model = shard.place(whole_map(simple_spec()))
        stub = shard_pb2_grpc.ShardStub(shard.channel)
        with refused_as(StateLost):
            next(stub.Pull(pb.PullRequest(model="model")))
        stream = StubStream(shard)
        assert not stream.opened.initialised
        stream.push(flat(model.layout, *gradients(model, 1)))
        with refused_as(StateLost):
            stream.result()


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (pb.StateTensor(slice=9, name="exp_avg", dtype=common_pb2.DTYPE_FLOAT32), "index below 2"),
        (pb.StateTensor(slice=0, name="exp_avg", dtype=common_pb2.DTYPE_FLOAT32, shape=[1 << 40]), "at most 12"),
        (pb.StateTensor(slice=0, name="exp_avg", dtype=common_pb2.DTYPE_FLOAT32, shape=[-1]), "at most 12"),
        (pb.StateTensor(slice=0, name="exp_avg", dtype=99), "dtype"),
    ],
)
def test_state_that_does_not_fit_is_refused_before_anything_is_written(state, text):
    with running_shard() as shard:
        model, initial = start(shard, **ADAM)
        with pytest.raises(grpc.RpcError) as failure:
            load_all(shard, pb.SaveHeader(state=[state]), flat(model.layout, *initial))
        error = error_of(failure.value)
        assert isinstance(error, InvalidRequest)
        assert text in str(error)
        assert save(shard)[1] == flat(model.layout, *initial)
        wait_until(lambda: model.pool.in_use == 0)


def test_a_load_that_ends_early_writes_nothing():
    with running_shard() as shard:
        model, initial = start(shard)
        with refused_as(PsError, f"{aligned(48) + aligned(20) - 4} more bytes"):
            load(shard, model, b"half")
        assert save(shard)[1] == flat(model.layout, *initial)


def test_what_slices_were_set_to_is_told_by_checksums_until_they_are_set_without():
    with running_shard() as shard:
        model, _ = start(shard)
        stub = shard_pb2_grpc.ShardStub(shard.channel)

        def told():
            return dict(stub.GetModel(pb.GetModelRequest(model="model")).assigned_checksums)

        assert load(shard, model, bytes(48 + 20), slices=[0, 1], checksums=[7, 8]).written
        assert told() == {0: 7, 1: 8}
        assert load(shard, model, bytes(48), slices=[0]).written
        assert told() == {1: 8}
        with refused_as(PsError, "one checksum for each"):
            load(shard, model, bytes(48), slices=[0], checksums=[1, 2])
        assert load(shard, model, bytes(model.layout.region_bytes)).written
        assert told() == {}


def test_get_model_tells_where_everyone_stands():
    with running_shard({0: 1, 1: 2}) as shard:
        model, _ = start(shard)
        train(shard, model, range(2))
        status = shard_pb2_grpc.ShardStub(shard.channel).GetModel(pb.GetModelRequest(model="model"))
        assert status.version == 2
        assert status.outcomes["applied"] == 2
        assert status.staleness_counts[0] == 2
        assert [(c.rank, c.clock, c.last_sequence) for c in status.clocks] == [(0, 2, 2), (1, 0, 0)]
