"""Gradients keep their values when slices move, in the memory they are in where that stays. About two seconds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ps_protocol.model.spec import ShardMap, Slice
from ps_protocol.wire.shared_memory import SharedMemory
from ps_worker.memory.plan import FlatPlan
from ps_worker.model.declare import build_spec
from ps_worker.step.gradients import GradientBuffers
from tests.support.length import examples
from tests.worker.fakes import place

SHARDS = 3


class Collected:
    """A module whose gradients have been collected, and the memory of its shards."""

    def __init__(self, rows: list[int], *, shared: bool) -> None:
        self.module = nn.ParameterList([nn.Parameter(torch.zeros(count, 3)) for count in rows])
        declaration = build_spec(torch.optim.SGD, self.module, {"lr": 0.1}, name="model")
        self.map: ShardMap = place(declaration.spec, SHARDS)
        self.plan = FlatPlan(self.map)
        self.gradients = GradientBuffers(self.plan, declaration.bindings)
        self.segments: list[SharedMemory | None] = [None] * SHARDS
        if shared:
            most = self.plan.total_bytes + 64 * (len(self.map.slices) + 1)
            self.segments = [SharedMemory.create(most) for _ in range(SHARDS)]
            self.place()
        for number, parameter in enumerate(self.module):
            parameter.grad = torch.full_like(parameter, number + 1.0)
        self.gradients.collect()

    def move(self, to: dict[int, int], *, behind: bool = True) -> None:
        """Slices by number in the map to other shards; ``behind`` what is there, else in front of it."""
        staying = [piece for n, piece in enumerate(self.map.slices) if n not in to]
        moving = [replace(self.map.slices[n], shard=shard) for n, shard in to.items()]
        order: list[Slice] = [*staying, *moving] if behind else [*moving, *staying]
        self.map = replace(self.map, epoch=self.map.epoch + 1, slices=tuple(order))
        self.plan = FlatPlan(self.map, self.plan)
        self.gradients.lay_out(self.plan)

    def place(self) -> None:
        for shard, layout in enumerate(self.plan.layouts):
            if not self.gradients.has_place(shard):
                self.gradients.place(shard, self.segments[shard] if layout.region_bytes else None)

    def check(self) -> None:
        """Every slice has its gradient, every other byte of a push is zero."""
        for shard, layout in enumerate(self.plan.layouts):
            wanted = torch.zeros(layout.region_bytes, dtype=torch.uint8)
            for span in layout.slices:
                wanted[span.begin : span.end].view(torch.float32).fill_(span.slice.variable + 1.0)
            assert torch.equal(self.gradients.region(shard), wanted)


moves = st.lists(
    st.tuples(st.dictionaries(st.integers(0, 5), st.integers(0, SHARDS - 1), max_size=6), st.booleans(), st.booleans()),
    max_size=3,
)


@given(st.lists(st.integers(1, 12), min_size=6, max_size=6), st.booleans(), moves)
@examples(150)
def test_wherever_slices_go_their_gradients_go_with_them(rows: list[int], shared: bool, made: list[Any]):
    collected = Collected(rows, shared=shared)
    for to, behind, placed in made:
        collected.move(to, behind=behind)
        if placed:
            collected.place()
            collected.check()
    collected.place()
    collected.check()


def test_gradients_in_place_stay_in_place_and_those_that_move_are_views_of_their_new_memory():
    collected = Collected([4] * 6, shared=True)
    collected.gradients.keep_in_place()
    for number, parameter in enumerate(collected.module):
        parameter.grad.fill_(number + 1.0)
    before = [parameter.grad.data_ptr() for parameter in collected.module]
    # Variables 0 and 3 are on shard 0; the second goes to shard 1, behind 1 and 4.
    collected.move({next(n for n, piece in enumerate(collected.map.slices) if piece.variable == 3): 1})
    collected.place()
    collected.check()
    after = [parameter.grad.data_ptr() for parameter in collected.module]
    assert [n for n in range(6) if before[n] != after[n]] == [3]
    collected.module[3].grad.fill_(9.0)
    span = collected.plan.layouts[1].slices[-1]
    assert collected.gradients.region(1)[span.begin : span.end].view(torch.float32).eq(9.0).all()
