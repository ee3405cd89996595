"""Optimizer state that stays keeps its memory when slices move, and trains on as if it had been loaded. Seconds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import DType, ModelSpec, ShardMap, Slice, Variable
from ps_server.optimizers.arena import StateMemory
from ps_server.optimizers.state import StateEntry, StateKey
from ps_server.state.region import Region
from ps_server.state.shifts import Shift
from tests.optimizers.models import ELEMENTWISE_CASES, SHAPED_CASES, Shard, case_id, spec_of
from tests.support.seeds import seeded

SHARDS = 2


def layouts(spec: ModelSpec, epoch: int, places: list[int], order: list[int]) -> list[Layout]:
    """``places``: of each variable its shard; ``order``: of the slices in the map."""
    slices = [Slice(n, 0, spec.variables[n].rows, places[n]) for n in order]
    shard_map = ShardMap(epoch, spec, SHARDS, tuple(sorted(slices, key=lambda piece: piece.shard)))
    return [Layout.of(shard_map, number) for number in range(SHARDS)]


@dataclass
class Job:
    """A model on two shards, whose state stays in its memory, or is loaded again."""

    stays: bool
    shards: list[Shard] = field(default_factory=list)

    def values(self) -> dict[int, Tensor]:
        found = {}
        for shard in self.shards:
            for index, span in enumerate(shard.region.layout.slices):
                found[span.slice.variable] = shard.region.slice(index).clone()
        return found

    def state(self) -> dict[tuple[int, str], Tensor]:
        found = {}
        for shard in self.shards:
            slices = shard.region.layout.slices
            for key, tensor in shard.optimizer.state():
                found[slices[key.slice_index].slice.variable, key.name] = tensor.clone()
        return found

    def move(self, following: list[Layout]) -> None:
        values, state = self.values(), self.state()
        before, self.shards = self.shards, [Shard.of(layout) for layout in following]
        for number, shard in enumerate(self.shards):
            places = {span.slice.variable: index for index, span in enumerate(shard.region.layout.slices)}
            for variable, index in places.items():
                shard.region.slice(index).copy_(values[variable])
            here: dict[int, int] = {}
            if self.stays:
                was = before[number].region.layout.slices
                held = {span.slice.variable: index for index, span in enumerate(was)}
                here = {held[variable]: places[variable] for variable in held.keys() & places.keys()}
            entries: list[StateEntry] = [
                (StateKey(places[variable], name), tensor)
                for (variable, name), tensor in state.items()
                if variable in places and places[variable] not in here.values()
            ]
            if self.stays:
                shard.optimizer.follow(before[number].optimizer, here, entries)
                assert not before[number].optimizer.state()
            else:
                shard.optimizer.load_state(entries)

    def step(self, gradients: list[Tensor], absent: set[int]) -> None:
        for shard in self.shards:
            into = Region(shard.region.layout)
            gone = set()
            for index, span in enumerate(shard.region.layout.slices):
                into.slice(index).copy_(gradients[span.slice.variable])
                if span.slice.variable in absent:
                    gone.add(index)
            shard.optimizer.apply(into, frozenset(gone))


def check_same(one: Job, other: Job) -> None:
    for found, expected in ((one.values(), other.values()), (one.state(), other.state())):
        assert found.keys() == expected.keys()
        for key, tensor in found.items():
            assert tensor.dtype == expected[key].dtype, key  # type: ignore[index]
            assert torch.equal(tensor.nan_to_num(7), expected[key].nan_to_num(7)), key  # type: ignore[index]
    for ours, theirs in zip(one.shards, other.shards, strict=True):
        cuts = [
            [[(s.first, s.last) for s in arena.segments] for arena in shard.optimizer._arenas]
            for shard in (ours, theirs)
        ]
        assert cuts[0] == cuts[1]


@pytest.mark.parametrize(("name", "options"), [*ELEMENTWISE_CASES, *SHAPED_CASES], ids=case_id)
def test_state_that_stays_trains_on_as_if_it_had_been_loaded(name: str, options: dict[str, Any]):
    source = seeded()
    dtypes = [DType.FLOAT32] if name in ("Muon", "Adafactor") else [DType.FLOAT32, DType.FLOAT64]
    spec = spec_of(name, dtypes, [options])
    count = len(spec.variables)
    jobs = Job(stays=True), Job(stays=False)
    generator = torch.Generator().manual_seed(source.randrange(1 << 20))
    first = layouts(spec, 1, places(source, count), list(range(count)))
    for job in jobs:
        job.shards = [Shard.of(layout) for layout in first]
    for epoch in range(2, 7):
        for _ in range(source.randrange(3)):
            absent = {n for n in range(count) if source.random() < 0.2}
            gradients = [torch.randn(v.shape, generator=generator) for v in spec.variables]
            for job in jobs:
                job.step(gradients, absent)
        order = source.sample(range(count), count) if source.random() < 0.3 else list(range(count))
        following = layouts(spec, epoch, places(source, count), order)
        for job in jobs:
            job.move(following)
        check_same(*jobs)


def places(source: random.Random, count: int) -> list[int]:
    """Often all on one shard: the other one's memory is empty then, and used again."""
    return source.choice([[0] * count, [1] * count, *([source.randrange(SHARDS) for _ in range(count)],) * 3])


def adam(sizes: list[int]) -> tuple[ModelSpec, list[int]]:
    variables = tuple(Variable(f"v{n}", (size,), DType.FLOAT32) for n, size in enumerate(sizes))
    return ModelSpec("model", "torch.optim.Adam", variables, ({"lr": 0.1},)), list(range(len(sizes)))


def stepped(spec: ModelSpec, held: list[int], order: list[int]) -> Job:
    job = Job(stays=True, shards=[Shard.of(layout) for layout in layouts(spec, 1, held, order)])
    job.step([torch.ones(v.shape) for v in spec.variables], set())
    return job


def addresses(shard: Shard) -> dict[tuple[int, str], int]:
    slices = shard.region.layout.slices
    return {
        (slices[key.slice_index].slice.variable, key.name): tensor.data_ptr()
        for key, tensor in shard.optimizer.state()
        if tensor.dim()
    }


def test_state_of_slices_that_keep_their_place_keeps_its_memory_also_where_it_grows():
    spec, order = adam([1000, 1000, 3000, 1000])
    job = stepped(spec, [0, 0, 1, 1], order)
    before = addresses(job.shards[0])
    job.shards[0].optimizer.expect(layouts(spec, 2, [0, 0, 0, 0], order)[0])
    job.move(layouts(spec, 2, [0, 0, 0, 0], order))
    after = addresses(job.shards[0])
    assert before.items() <= after.items()
    # Also where all of it has left for a while.
    job.move(layouts(spec, 3, [1, 1, 1, 1], order))
    job.shards[0].optimizer.trim()
    job.move(layouts(spec, 4, [0, 0, 0, 0], order))
    assert addresses(job.shards[0]) == after


def test_padding_is_zero_where_state_was_before():
    # 33 elements leave 15 of padding, where the state of the slices before was.
    spec, order = adam([64, 33, 33, 64])
    job = stepped(spec, [0, 0, 0, 0], order)
    job.move(layouts(spec, 2, [1, 0, 0, 0], order))
    job.move(layouts(spec, 3, [1, 0, 0, 1], order))
    (arena,) = job.shards[0].optimizer._arenas
    for memory in arena._flat.values():
        for at in range(len(arena._slices)):
            begin, end = arena._padding(at)
            assert begin < end
            assert not memory.part(begin, end).any()


def test_a_shard_that_has_nothing_yet_makes_memory_for_state_ahead():
    spec, order = adam([1000, 1000])
    job = stepped(spec, [0, 0], order)
    following = layouts(spec, 2, [0, 1], order)
    job.shards[1].optimizer.expect(following[1])
    (arena,) = job.shards[1].optimizer._arenas
    made = dict(arena._flat)
    assert set(made) == {"exp_avg", "exp_avg_sq"}
    job.move(following)
    assert job.shards[1].optimizer._arenas[0]._flat == made


def test_memory_gives_back_what_it_does_not_need_and_returns_it_as_zeros():
    memory = StateMemory(10_000, 20_000, torch.float32)
    assert memory.fits(20_000)
    assert not memory.fits(21_000)
    memory.touch(20_000)
    memory.part(0, 20_000).fill_(1.0)
    memory.trim(5_000)
    assert memory.part(0, 5_000).all()
    assert not memory.part(5_120, 20_000).any()  # from the next page on
    memory.part(0, 100).copy_(torch.arange(100.0))
    memory.shift([Shift(10, 20, 15)], [(0, 15)])
    assert memory.part(0, 25).tolist() == [0.0] * 15 + [float(n) for n in range(10, 20)]


def test_memory_without_address_space_behind_it_has_its_size_alone():
    memory = StateMemory(10_000, 1 << 62, torch.float32)
    assert not memory.fits(1 << 20)
    memory.part(0, 10_000).fill_(1.0)
    memory.touch(1 << 20)
