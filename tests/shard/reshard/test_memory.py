"""What stays keeps its memory when slices move, and no byte of it is another. In one process, under a second."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import DType, Kind, ModelSpec, ShardMap, Slice, Variable
from ps_server.consistency import WorkerKey
from ps_server.log.entries import StagedReshard
from ps_server.shard.resharding import IncomingMemory, coming_slices
from ps_server.shard.step.published import Published
from ps_server.state.lent_regions import LentRegions
from ps_server.state.model_state import ModelState, new_model
from ps_server.state.region import Region, RegionPool
from ps_server.state.reshard import resharded
from ps_server.state.shifts import slice_shifts
from tests.support.length import examples

ANNA = WorkerKey(0, 7)


def map_of(rows: list[int], places: list[int], order: list[int] | None = None, epoch: int = 1) -> ShardMap:
    """Every third variable is a buffer, every other one of two rows' type; in ``order`` in the map."""
    variables = tuple(
        Variable(
            f"v{n}",
            (count,),
            DType.FLOAT64 if n % 2 else DType.FLOAT32,
            Kind.BUFFER if n % 3 == 2 else Kind.PARAMETER,
        )
        for n, count in enumerate(rows)
    )
    spec = ModelSpec("model", "torch.optim.SGD", variables, ({"lr": 0.1, "momentum": 0.9},))
    slices = [Slice(n, 0, rows[n], places[n]) for n in order or range(len(rows))]
    return ShardMap(epoch, spec, 2, tuple(sorted(slices, key=lambda piece: piece.shard)))


def filled(shard_map: ShardMap) -> ModelState:
    """Shard 0's part; each slice holds the number of its variable, one more."""
    model = new_model(shard_map, 0)
    for index, span in enumerate(model.replica.layout.slices):
        model.replica.region.slice(index).fill_(span.slice.variable + 1.0)
    return model


def staged(model: ModelState, wanted: ShardMap) -> ModelState:
    held = {span.slice.variable for span in model.replica.layout.slices}
    layout = Layout.of(wanted, 0)
    incoming = tuple(i for i, span in enumerate(layout.slices) if span.slice.variable not in held)
    values = Region(layout)
    for index in incoming:
        values.slice(index).fill_(layout.slices[index].slice.variable + 1.0)
    pieces = (values.bytes[layout.slices[i].begin : layout.slices[i].end] for i in incoming)
    model.pending = StagedReshard(wanted, incoming, memoryview(b"".join(pieces)), [])
    return model


def check(region: Region) -> None:
    """Every slice has its values; every other byte is zero."""
    wanted = Region(region.layout)
    for index, span in enumerate(region.layout.slices):
        wanted.slice(index).fill_(span.slice.variable + 1.0)
    assert torch.equal(region.data, wanted.data)


cases = st.integers(1, 8).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(1, 40), min_size=n, max_size=n),
        st.lists(st.integers(0, 1), min_size=n, max_size=n),
        st.lists(st.integers(0, 1), min_size=n, max_size=n),
        st.permutations(range(n)),
    )
)


@given(cases, st.booleans())
@examples(200)
def test_wherever_slices_go_each_has_its_bytes_and_there_are_zeros_between(case: Any, is_read: bool):
    rows, here, there, order = case
    model = filled(map_of(rows, here))
    before = model.replica.region
    kept = before.data.clone()
    model.unread = lambda: not is_read
    after = resharded(staged(model, map_of(rows, there, list(order), epoch=2)), 0)
    check(after.replica.region)
    if is_read:
        assert torch.equal(before.data, kept)


def test_what_stays_in_its_place_is_not_copied_and_what_comes_lies_behind_it():
    rows = [16, 16, 16, 16]
    held, wanted = map_of(rows, [0, 0, 1, 1]), map_of(rows, [0, 0, 0, 1], epoch=2)
    model = filled(held)
    address = model.replica.region.data.data_ptr()
    assert slice_shifts(Layout.of(held, 0), Layout.of(wanted, 0), {0: 0, 1: 1}) == []
    after = resharded(staged(model, wanted), 0)
    assert after.replica.region.data.data_ptr() == address
    check(after.replica.region)


def test_slices_that_change_places_take_another_region():
    rows = [16, 16]
    held, wanted = map_of(rows, [0, 0]), map_of(rows, [0, 0], [1, 0], epoch=2)
    # Of one type and kind, so that they are in one arena.
    same = replace(held.spec, variables=tuple(replace(v, dtype=DType.FLOAT32) for v in held.spec.variables))
    before, after = Layout.of(replace(held, spec=same), 0), Layout.of(replace(wanted, spec=same), 0)
    assert slice_shifts(before, after, {0: 1, 1: 0}) is None


def test_answers_on_their_way_are_waited_for_a_while_and_then_left_alone():
    async def test() -> None:
        ready = asyncio.get_running_loop().create_future()
        layout = layouts()[2]
        ready.set_result(Region(layout))
        published = Published(1, ready, RegionPool(layout))
        assert published.unread(60.0)
        published.take(quick=False)
        assert not published.unread(0.0)
        assert not published.unread(0.01)
        waiting = asyncio.create_task(asyncio.to_thread(published.unread, 60.0))
        await asyncio.sleep(0)
        published.give_back(quick=False)
        assert await waiting

    asyncio.run(asyncio.wait_for(test(), 60))


def layouts(count: int = 4) -> list[Layout]:
    return [Layout.of(map_of([100] * count, [0] * n + [1] * (count - n)), 0) for n in range(count + 1)]


def test_a_worker_gets_its_memory_again_after_a_move_and_nobody_else():
    small, large = layouts()[2:4]
    lent, after = LentRegions(small), LentRegions(large)
    (region,) = lent.take(ANNA, 1)
    region.data.fill_(1)
    lent.hold()
    after.keep(lent)
    (other,) = after.take(WorkerKey(1, 8), 1)
    assert other.segment is not region.segment
    (again,) = after.take(ANNA, 1)
    assert again.segment is region.segment
    assert again.layout is large
    assert torch.equal(again.data[: small.region_bytes], region.data)
    (once_more,) = after.take(ANNA, 1)  # an outage: a push that the shard holds may be in the other
    assert once_more.segment is not region.segment


def test_memory_of_a_worker_that_is_gone_is_not_kept():
    (layout,) = layouts()[2:3]
    lent, after = LentRegions(layout), LentRegions(layout)
    taken = lent.take(ANNA, 2)
    lent.hold()
    after.keep(lent)
    after.members({0: ANNA.incarnation + 1})
    assert all(new.segment is not old.segment for new, old in zip(after.take(ANNA, 2), taken, strict=True))


def test_regions_of_a_pool_go_on_in_the_next_layout_as_many_as_there_are_streams():
    small, large = layouts()[2:4]
    pool, after = RegionPool(small), RegionPool(large)
    with pool.reserved():
        waiting, under_way = pool.take(), pool.take()
        pool.give(waiting)
        pool.hold()
        pool.continue_in(after)
        pool.give(under_way)
        assert after.spare == 1
    with after.reserved():
        assert after.take().segment is waiting.segment
    assert after.spare == 0


def test_streams_that_share_a_region_find_it_again_after_a_move():
    small, large = layouts()[2:4]
    pool, after = RegionPool(small), RegionPool(large)
    with pool.reserved(sharing=True), pool.reserved(sharing=True):
        taken = [pool.take(), pool.take()]
        for region in taken:
            pool.give(region)
        assert pool.spare == 1, "one for both"
        again = pool.take()
        assert again is taken[0]
        pool.hold()
        pool.continue_in(after)
        pool.give(again)
    with after.reserved(sharing=True):
        assert after.spare == 1
        assert after.take().segment is again.segment
    assert after.spare == 0


@pytest.mark.parametrize("sharing", [False, True])
def test_memory_of_streams_that_end_before_the_next_layout_is_there_is_kept_for_it(sharing: bool):
    small, large = layouts()[2:4]
    pool, after = RegionPool(small), RegionPool(large)
    with pool.reserved(sharing=sharing):
        taken = pool.take()
        pool.give(taken)
        pool.hold()
    assert pool.spare == 1, "given back to the system and touched again it would cost a second"
    pool.continue_in(after)
    with after.reserved(sharing=sharing):
        assert after.take().segment is taken.segment
    assert after.spare == 0


def test_memory_is_had_ahead_for_every_region_of_a_pool():
    small, large = layouts()[2:4]
    pool = RegionPool(small)
    region = pool.take()
    pool.touch(large.region_bytes)
    relaid = region.relaid(large)
    assert relaid is not None
    assert len(relaid.data) == large.region_bytes
    assert region.relaid(layouts()[0]) is None, "a shard that holds nothing keeps no memory"


def test_memory_for_what_comes_is_used_again_when_it_is_given_back():
    memory = IncomingMemory()
    memory.make(100)
    taken = memory.take()
    assert memory.take().memory is not taken.memory, "what is taken is its taker's alone"
    memory.clear()
    memory.give(taken)
    again = memory.take()
    assert again.memory is taken.memory
    values, state, more = again.cut(20), again.tensor((2, 3), torch.float32), again.cut(100)
    state.fill_(1.0)
    assert [len(values), len(more)] == [20, 100]
    assert bytes(again.memory[64:88]) == bytes(state.numpy())
    assert values.obj is again.memory
    assert more.obj is not again.memory, "there was not enough"
    assert again.tensor((0, 3), torch.float64).shape == (0, 3)


def test_what_comes_and_its_state_are_counted_ahead():
    held, wanted = layouts()[1:3]
    slices = coming_slices(held, wanted)
    assert [span.end - span.begin for span in slices] == [800]
    # Momentum, a float64 for each of 100 elements; buffers have no state.
    assert new_model(held.shard_map, 0).replica.state_bytes([*slices, *coming_slices(wanted, layouts()[3])]) == 832
