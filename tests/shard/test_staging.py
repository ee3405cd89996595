"""Parts of a push that come ahead of it, spoken with generated stubs only."""

from __future__ import annotations

import grpc
import pytest

from ps_protocol.errors import InvalidRequest
from ps_protocol.v1 import common_pb2 as common
from ps_protocol.v1 import shard_pb2 as pb
from tests.support.shards import (
    StubStream,
    assert_equal,
    error_of,
    flat,
    gradients,
    reference,
    running_shard,
    start,
    wait_until,
)


def test_a_push_whose_parts_came_ahead_is_applied_as_a_whole_one():
    with running_shard() as shard:
        model, initial = start(shard)
        stream, grads = StubStream(shard), gradients(model, 1)
        payload = flat(model.layout, *grads)
        stream.send(stage=pb.Stage(begin=0, end=8, payload=bytes(8)))
        # The same part again overwrites it; another comes behind its message.
        stream.send(stage=pb.Stage(begin=0, end=8, payload=payload[:8]))
        stream.send(stage=pb.Stage(begin=20, end=32))
        stream.send(chunk=pb.Chunk(payload=payload[20:32]))
        _, answer = stream.exchange(payload[8:20] + payload[32:], staged=[0, 8, 20, 32])
        assert_equal(answer, model, reference(initial, [grads]))
        # What came ahead serves one push only.
        with pytest.raises(grpc.RpcError) as failed:
            stream.exchange(payload[8:], staged=[0, 8])
        assert isinstance(error_of(failed.value), InvalidRequest)
        wait_until(lambda: model.pool.in_use == 0)


@pytest.mark.parametrize("span", [(8, 8), (8, 4), (0, 1 << 40), (60, 72)])
def test_a_part_outside_the_parameters_ends_the_stream(span):
    with running_shard() as shard:
        model, _ = start(shard)
        stream = StubStream(shard)
        stream.send(stage=pb.Stage(begin=span[0], end=span[1], payload=b"1234"))
        with pytest.raises(grpc.RpcError) as failed:
            stream.result()
        assert isinstance(error_of(failed.value), InvalidRequest)
        wait_until(lambda: model.pool.in_use == 0)


@pytest.mark.parametrize("staged", [[0, 9], [4, 12], [0, 4, 8], [4, 0], [8, 16]])
def test_a_push_that_counts_on_bytes_that_have_not_come_is_refused(staged):
    with running_shard() as shard:
        model, _ = start(shard)
        stream = StubStream(shard)
        stream.send(stage=pb.Stage(begin=0, end=8, payload=bytes(8)))
        with pytest.raises(grpc.RpcError) as failed:
            stream.exchange(bytes(model.layout.region_bytes), staged=staged)
        assert isinstance(error_of(failed.value), InvalidRequest)
        wait_until(lambda: model.pool.in_use == 0)


def test_the_memory_of_parts_is_free_again_when_no_push_follows_them():
    with running_shard() as shard:
        model, _ = start(shard)
        ended, cancelled, skipping = StubStream(shard), StubStream(shard), StubStream(shard)
        for stream in (ended, cancelled, skipping):
            stream.send(stage=pb.Stage(begin=0, end=8, payload=bytes(8)))
        wait_until(lambda: model.pool.in_use == 3)
        ended.end()
        cancelled.cancel()
        skipping.exchange(b"", skipped=True)
        wait_until(lambda: model.pool.in_use == 0)


def test_parts_do_not_go_with_a_wire_format():
    with running_shard() as shard:
        start(shard)
        stream = StubStream(shard, wire=common.Wire(format=common.WIRE_FORMAT_BF16))
        stream.send(stage=pb.Stage(begin=0, end=8, payload=bytes(8)))
        with pytest.raises(grpc.RpcError) as failed:
            stream.result()
        assert "wire format" in str(error_of(failed.value))


def test_an_unknown_wire_format_is_refused_when_the_stream_opens():
    with running_shard() as shard:
        start(shard)
        with pytest.raises(grpc.RpcError) as failed:
            StubStream(shard, wire=common.Wire(format=99))
        assert isinstance(error_of(failed.value), InvalidRequest)
