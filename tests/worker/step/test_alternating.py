"""Gradients in two memories: what is pushed is what was there at the step, whatever happens to them and to the memory.

Costs about 3 s.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from ps_protocol.model.spec import ModelSpec, ShardMap, Slice
from ps_protocol.wire.shared_memory import SharedMemory
from ps_worker.memory.flat import FlatModel
from ps_worker.memory.parked import ParkedGradients
from ps_worker.model.declare import build_spec
from ps_worker.step import gradients as gradients_module
from ps_worker.step.gradients import GradientBuffers, Gradients
from tests.support.length import choose
from tests.worker.fakes import place

SHARDS = 3


class Trainer:
    """A worker without shards: each gradient is one number everywhere."""

    def __init__(self, rows: list[int], *, shared: bool, parts: bool = False) -> None:
        """``parts``: a shard has a variable in several slices, which are neighbours."""
        self.module = nn.ParameterList([nn.Parameter(torch.zeros(count, 3)) for count in rows])
        declaration = build_spec(torch.optim.SGD, self.module, {"lr": 0.1}, name="model")
        self.map: ShardMap = in_parts(declaration.spec) if parts else place(declaration.spec, SHARDS)
        self.flat = FlatModel(declaration.bindings, self.map, doubled=True)
        self.gradients = Gradients(self.flat.plan, declaration.bindings, doubled=True)
        self.shared = shared
        #: What a shard lends: the same to streams that are opened again after a move.
        self.lent: list[list[SharedMemory]] = []
        self.open(others=True)
        self.pushed: list[float | None] = []
        self.expected: list[float | None] = [None] * len(rows)

    def open(self, *, others: bool) -> None:
        """Streams are opened; ``others``: with other memory of the shards than before."""
        if others:
            most = self.flat.plan.total_bytes + 64 * (len(self.map.slices) + 1)
            self.lent = [[SharedMemory.create(most) for _ in range(2)] for _ in range(SHARDS)] if self.shared else []
        for shard, layout in enumerate(self.flat.plan.layouts):
            if self.shared and layout.region_bytes:
                self.gradients.place(shard, *self.lent[shard])
            elif not self.gradients.pushed.has_place(shard):
                self.gradients.place(shard)

    def move(self, chosen: random.Random) -> None:
        to = [chosen.randrange(SHARDS) for _ in self.module]
        # Of some variables all slices go to one shard.
        together = [chosen.random() < 0.5 for _ in self.module]
        slices = [
            replace(s, shard=to[s.variable] if together[s.variable] else chosen.choice([s.shard, to[s.variable]]))
            for s in self.map.slices
        ]
        self.map = replace(self.map, epoch=self.map.epoch + 1, slices=tuple(slices))
        self.flat.lay_out(self.map)
        self.gradients.lay_out(self.flat.plan)
        self.open(others=False)

    def backward(self, value: float) -> None:
        for number, parameter in enumerate(self.module):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.add_(value + number)
            self.expected[number] = (self.expected[number] or 0.0) + value + number

    def step(self) -> None:
        self.gradients.collect()
        self.pushed = list(self.expected)
        self.gradients.pushed.park()

    def zero(self) -> None:
        self.gradients.keep_in_place(pushing=True)
        for parameter in self.module:
            if parameter.grad is not None:
                parameter.grad.zero_()
        self.expected = [None if value is None else 0.0 for value in self.expected]

    def set_to_none(self) -> None:
        for parameter in self.module:
            parameter.grad = None
        self.expected = [None] * len(self.expected)

    def check(self) -> None:
        for parameter, value in zip(self.module, self.expected, strict=True):
            assert (parameter.grad is None) == (value is None)
            assert parameter.grad is None or set(parameter.grad.view(-1).tolist()) == {value}
        for shard, layout in enumerate(self.flat.plan.layouts if self.pushed else ()):
            for span in layout.slices:
                if (value := self.pushed[span.slice.variable]) is not None:
                    region = self.gradients.pushed.region(shard)[span.begin : span.end].view(torch.float32)
                    assert set(region.tolist()) == {value}


def in_parts(spec: ModelSpec) -> ShardMap:
    """Each variable on one shard, in slices of 16 rows, so that the next one needs no padding."""
    slices = [
        Slice(number, begin, min(begin + 16, variable.rows), number % SHARDS)
        for number, variable in enumerate(spec.variables)
        for begin in range(0, variable.rows, 16)
    ]
    return ShardMap(1, spec, SHARDS, tuple(slices))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rows", [1, 40], ids=["one slice each", "three slices each"])
def test_gradients_that_stay_in_place_are_never_copied(
    rows: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Trainer([rows] * 6, shared=shared, parts=True)
    job.backward(1.0)
    job.step()
    job.check()

    def copied(*_: object) -> None:
        raise AssertionError("copied")

    monkeypatch.setattr(GradientBuffers, "_copy_in", copied)
    monkeypatch.setattr(ParkedGradients, "part", copied)
    places = []
    for value in range(2, 8):
        job.zero()
        job.backward(float(value))
        places.append([p.grad.data_ptr() for p in job.module])
        job.check()
        job.step()
        job.check()
    assert places[0] != places[1]
    assert places[0::2] == [places[0]] * 3
    assert places[1::2] == [places[1]] * 3


def test_a_gradient_that_somebody_holds_stays_the_same_tensor() -> None:
    job = Trainer([4, 900], shared=True)
    job.backward(1.0)
    job.zero()
    job.backward(2.0)
    held = [parameter.grad for parameter in job.module]
    for value in range(3, 7):
        job.step()
        job.check()
        job.zero()
        job.backward(float(value))
        assert all(parameter.grad is gradient for parameter, gradient in zip(job.module, held, strict=True))
    held.clear()
    job.step()
    job.check()


def test_without_private_mappings_gradients_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients_module, "can_map_privately", lambda: False)
    job = Trainer([4, 900], shared=True)
    for value in range(4):
        job.backward(float(value))
        job.step()
        job.zero()
        job.check()
    own = [parameter.grad for parameter in job.module]
    job.zero()
    assert all(parameter.grad is gradient for parameter, gradient in zip(job.module, own, strict=True))


def test_a_gradient_in_place_becomes_the_users_own_where_its_variable_is_parted() -> None:
    job = Trainer([40, 40, 40], shared=True, parts=True)
    job.backward(1.0)
    job.zero()
    job.backward(2.0)
    job.step()
    job.zero()
    job.backward(3.0)
    moved = [replace(s, shard=2) if s.row_begin == 16 else s for s in job.map.slices]
    job.map = replace(job.map, epoch=2, slices=tuple(moved))
    job.flat.lay_out(job.map)
    job.gradients.lay_out(job.flat.plan)
    job.open(others=False)
    job.check()
    job.step()
    job.check()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("seed", range(choose(12, 6)))
def test_in_any_order_pushes_are_what_the_step_found_and_gradients_the_users(seed: int, shared: bool) -> None:
    chosen = random.Random(seed)
    print(f"seed {seed}")
    job = Trainer([chosen.choice([1, 20, 400]) for _ in range(7)], shared=shared, parts=seed % 2 == 0)
    kept: list[tuple[torch.Tensor, float]] = []
    for value in range(1, 60):
        match chosen.choice(["backward", "step", "zero", "zero", "none", "open", "move", "hold", "drop"]):
            case "backward":
                job.backward(float(value))
            case "step":
                job.backward(float(value))
                job.step()
            case "zero":
                job.zero()
            case "none":
                job.set_to_none()
            case "open":
                job.open(others=True)
            case "move":
                job.move(chosen)
            case "hold":
                # What a user takes after a step, and goes on with others, keeps its values.
                job.backward(float(value))
                job.step()
                gradients = [(p.grad, number) for p, number in zip(job.module, job.expected, strict=True)]
                kept = [(gradient, number) for gradient, number in gradients if gradient is not None]
                del gradients
                job.set_to_none()
            case "drop":
                kept = []
        job.check()
        assert all(set(gradient.view(-1).tolist()) == {number} for gradient, number in kept)
