"""Parts of a push that come ahead of it, spoken with generated stubs only."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ps_protocol.errors import InvalidRequest, PsError
from ps_protocol.model.layout import Layout, subtract
from ps_protocol.v1 import common_pb2 as common
from ps_protocol.v1 import shard_pb2 as pb
from ps_server.shard.step.staging import MAX_RANGES, Staging
from ps_server.state.region import RegionPool
from tests.support.seeds import seeded
from tests.support.shards import (
    StubStream,
    assert_equal,
    flat,
    gradients,
    reference,
    refused_as,
    running_shard,
    simple_spec,
    start,
    wait_until,
    whole_map,
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
        with refused_as(InvalidRequest):
            stream.exchange(payload[8:], staged=[0, 8])
        wait_until(lambda: model.pool.in_use == 0)


@pytest.mark.parametrize("span", [(8, 8), (8, 4), (0, 1 << 40), (60, 72)])
def test_a_part_outside_the_parameters_ends_the_stream(span):
    with running_shard() as shard:
        model, _ = start(shard)
        stream = StubStream(shard)
        stream.send(stage=pb.Stage(begin=span[0], end=span[1], payload=b"1234"))
        with refused_as(InvalidRequest):
            stream.result()
        wait_until(lambda: model.pool.in_use == 0)


@pytest.mark.parametrize("staged", [[0, 9], [4, 12], [0, 4, 8], [4, 0], [8, 16]])
def test_a_push_that_counts_on_bytes_that_have_not_come_is_refused(staged):
    with running_shard() as shard:
        model, _ = start(shard)
        stream = StubStream(shard)
        stream.send(stage=pb.Stage(begin=0, end=8, payload=bytes(8)))
        with refused_as(InvalidRequest):
            stream.exchange(bytes(model.layout.region_bytes), staged=staged)
        wait_until(lambda: model.pool.in_use == 0)


def test_the_memory_of_parts_is_free_again_when_no_push_follows_them():
    with running_shard({0: 1, 1: 2, 2: 3}) as shard:
        model, _ = start(shard)
        ended, cancelled, skipping = (StubStream(shard, rank=rank, incarnation=rank + 1) for rank in range(3))
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
        with refused_as(PsError, "wire format"):
            stream.result()


def test_an_unknown_wire_format_is_refused_when_the_stream_opens():
    with running_shard() as shard:
        start(shard)
        with refused_as(InvalidRequest):
            StubStream(shard, wire=common.Wire(format=99))


def staging_of(elements: int) -> Staging:
    layout = Layout.of(whole_map(simple_spec((elements,))), 0)
    return Staging(layout, RegionPool(layout))


def test_ranges_are_what_a_set_of_bytes_is():
    draw = seeded()
    for _ in range(200):
        staging, staged = staging_of(16), set()
        for _ in range(draw.randrange(1, 12)):
            begin = draw.randrange(64)
            end = draw.randrange(begin + 1, 65)
            staging.place(begin, end)
            staged |= set(range(begin, end))
        ranges = staging._ranges
        assert {byte for begin, end in ranges for byte in range(begin, end)} == staged
        # In order, and none touches the next.
        assert all(one[1] < other[0] for one, other in pairwise(ranges))
        wanted = sorted(draw.sample(range(65), 2 * draw.randrange(1, 6)))
        pairs = list(zip(wanted[::2], wanted[1::2], strict=True))
        left = {byte for begin, end in subtract(pairs, ranges) for byte in range(begin, end)}
        assert left == {byte for begin, end in pairs for byte in range(begin, end)} - staged
        if left:
            with pytest.raises(InvalidRequest, match="counts on bytes"):
                staging.checked(wanted)
        else:
            assert staging.checked(wanted) == pairs


def test_many_parts_that_lie_apart_are_taken_up_to_a_bound():
    """Twice a quadratic number of steps for so many would take minutes."""
    staging = staging_of(4 * MAX_RANGES)
    for number in range(MAX_RANGES):
        staging.place(8 * number, 8 * number + 1)
    with pytest.raises(InvalidRequest, match="too scattered") as refused:
        staging.place(8 * MAX_RANGES, 8 * MAX_RANGES + 1)
    assert refused.value.remedy
    flat_ranges = [edge for number in range(MAX_RANGES) for edge in (8 * number, 8 * number + 1)]
    assert len(staging.checked(flat_ranges)) == MAX_RANGES
    with pytest.raises(InvalidRequest) as wrong:
        staging.checked([0, 2])
    assert len(wrong.value.expected) < 1000
    # What joins two of them is taken all the same.
    staging.place(0, 9)
    staging.discard()
