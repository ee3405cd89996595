"""Optimizer state goes out slice by slice and comes back, and training goes on as if it had never stopped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import DType, ModelSpec, ShardMap, Slice, Variable
from ps_server.optimizers.state import StateEntry, StateKey
from ps_server.state.region import Region
from tests.support.length import examples

from .models import (
    ELEMENTWISE_CASES,
    SHAPED_CASES,
    Shard,
    Step,
    case_id,
    close,
    fill,
    run,
    spec_of,
    steps,
    whole_layout,
)

ADAM = spec_of("Adam", (DType.FLOAT32,), [{"lr": 0.01}])


def train(shard: Shard, pushes: list[Step], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = Region(shard.region.layout)
    for push in pushes:
        fill(gradients, generator)
        run(shard, gradients, push)


def raw(entries: list[StateEntry]) -> dict[StateKey, tuple[torch.dtype, tuple[int, ...], list[int]]]:
    return {key: (t.dtype, tuple(t.shape), t.reshape(-1).view(torch.uint8).tolist()) for key, t in entries}


@pytest.mark.parametrize(("name", "options"), ELEMENTWISE_CASES + SHAPED_CASES, ids=case_id)
@examples(8)
@given(before=steps(0), after=steps(), seed=st.integers(0, 9))
def test_a_restored_shard_goes_on_bit_equal_to_one_that_never_stopped(
    name: str, options: dict[str, Any], before: list[Step], after: list[Step], seed: int
) -> None:
    layout = whole_layout(spec_of(name, (DType.FLOAT32, DType.BFLOAT16), [options]))
    first = Shard.of(layout)
    fill(first.region, torch.Generator().manual_seed(seed))
    train(first, before, seed + 1)
    values, state = first.saved()

    second = Shard.of(layout, values)
    train(second, [Step(frozenset({0, 2}), (1.0, 1.0), 1.0)], seed + 2)
    second.region.bytes[:] = values
    second.optimizer.load_state(state)
    assert raw(second.optimizer.state()) == raw(state)

    for shard in (first, second):
        train(shard, after, seed + 3)
    assert bytes(first.region.bytes) == bytes(second.region.bytes)
    assert raw(first.optimizer.state()) == raw(second.optimizer.state())


@pytest.mark.parametrize("absent", [frozenset[int](), frozenset(range(0, 200, 2))], ids=["together", "parted"])
def test_many_small_slices_round_alike_before_and_after_they_are_restored(absent: frozenset[int]) -> None:
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    variables = tuple(Variable(f"v{i}", (3,), DType.FLOAT32) for i in range(200))
    layout = whole_layout(ModelSpec("model", "torch.optim.SGD", variables, (options,)))
    first = Shard.of(layout)
    fill(first.region, torch.Generator().manual_seed(1))
    always = [Step(frozenset(), (1.0, 1.0), 1.0)] * 3
    train(first, [Step(absent, (1.0, 1.0), 1.0), *always], 2)
    values, state = first.saved()
    second = Shard.of(layout, values)
    second.optimizer.load_state(state)
    for shard in (first, second):
        train(shard, always, 3)
    assert bytes(first.region.bytes) == bytes(second.region.bytes)


@pytest.mark.parametrize(("name", "options"), ELEMENTWISE_CASES, ids=case_id)
def test_state_moves_between_one_shard_and_two(name: str, options: dict[str, Any]) -> None:
    spec = spec_of(name, (DType.FLOAT32,), [options])
    one = Shard.of(whole_layout(spec))
    fill(one.region, torch.Generator().manual_seed(1))
    train(one, [Step(frozenset(), (1.0, 1.0), 1.0), Step(frozenset({2}), (1.0, 1.0), 1.0)], 2)

    two = [Shard.of(layout) for layout in halves(spec)]
    saved = dict(one.optimizer.state())
    for shard in two:
        entries: list[StateEntry] = []
        for index, span in enumerate(shard.region.layout.slices):
            rows = slice(span.slice.row_begin, span.slice.row_end)
            whole = one.region.slice(span.slice.variable)
            shard.region.slice(index).copy_(whole[rows] if whole.dim() else whole)
            for key, tensor in saved.items():
                if key.slice_index == span.slice.variable and whole.numel():
                    split = tensor.shape == whole.shape and tensor.dim() > 0
                    entries.append((StateKey(index, key.name), tensor[rows] if split else tensor))
        shard.optimizer.load_state(entries)

    gradients = Region(one.region.layout)
    fill(gradients, torch.Generator().manual_seed(3))
    one.optimizer.apply(gradients)
    for shard in two:
        parts = Region(shard.region.layout)
        for index, span in enumerate(shard.region.layout.slices):
            whole = gradients.slice(span.slice.variable)
            parts.slice(index).copy_(whole[span.slice.row_begin : span.slice.row_end] if whole.dim() else whole)
        shard.optimizer.apply(parts)
        for index, span in enumerate(shard.region.layout.slices):
            whole = one.region.slice(span.slice.variable)
            rows = whole[span.slice.row_begin : span.slice.row_end] if whole.dim() else whole
            close(shard.region.slice(index), rows, DType.FLOAT32)


def halves(spec: ModelSpec) -> list[Layout]:
    slices = []
    for number, variable in enumerate(spec.variables):
        middle = variable.rows // 2
        slices += [Slice(number, 0, middle, 0)] if middle else []
        slices.append(Slice(number, middle, variable.rows, 1))
    shard_map = ShardMap(1, spec, 2, tuple(slices))
    return [Layout.of(shard_map, shard) for shard in range(2)]


@pytest.mark.parametrize(("name", "options"), ELEMENTWISE_CASES + SHAPED_CASES, ids=case_id)
def test_state_is_tensors_only_and_a_slice_without_a_gradient_has_none(name: str, options: dict[str, Any]) -> None:
    shard = Shard.of(whole_layout(spec_of(name, (DType.FLOAT32,), [options])))
    fresh = {key.slice_index for key, _ in shard.optimizer.state()}
    train(shard, [Step(frozenset({1}), (1.0, 1.0), 1.0)], 1)
    entries = shard.optimizer.state()
    assert all(type(tensor) is torch.Tensor for _, tensor in entries)
    assert [key.slice_index for key, _ in entries] == sorted(key.slice_index for key, _ in entries)
    assert 1 in fresh or 1 not in {key.slice_index for key, _ in entries}


def test_loading_nothing_resets_the_state() -> None:
    shard = Shard.of(whole_layout(spec_of("Adagrad", (DType.FLOAT32,), [{"initial_accumulator_value": 0.5}])))
    assert shard.optimizer.state() != []
    shard.optimizer.load_state([])
    assert shard.optimizer.state() == []
    gradients = Region(shard.region.layout)
    shard.optimizer.apply(gradients)
    sums = [tensor for key, tensor in shard.optimizer.state() if key.name == "sum"]
    assert sums
    assert all(bool((tensor == 0.5).all()) for tensor in sums)


@pytest.mark.parametrize(
    ("key", "tensor", "says"),
    [
        (StateKey(0, "exp_avg"), torch.zeros(7, 5), r"variable: v0; expected: torch.float32 of shape \(5, 7\)"),
        (StateKey(0, "exp_avg"), torch.zeros(5, 7).double(), r"actual: torch.float64 of shape \(5, 7\)"),
        (StateKey(0, "momentum_buffer"), torch.zeros(5, 7), "variable: v0; expected: exp_avg, exp_avg_sq, step"),
        (StateKey(99, "exp_avg"), torch.zeros(5, 7), "expected: a slice index below 7; actual: 99"),
    ],
)
def test_state_that_does_not_fit_is_refused_and_nothing_is_changed(
    key: StateKey, tensor: torch.Tensor, says: str
) -> None:
    shard = Shard.of(whole_layout(ADAM))
    train(shard, [Step(frozenset({3}), (1.0, 1.0), 1.0)], 1)
    _, before = shard.saved()
    with pytest.raises(InvalidRequest, match=says):
        shard.optimizer.load_state([(k, t) for k, t in before if k != key] + [(key, tensor)])
    assert raw(shard.optimizer.state()) == raw(before)


def test_a_slice_with_only_part_of_its_state_is_refused() -> None:
    shard = Shard.of(whole_layout(ADAM))
    train(shard, [Step(frozenset(), (1.0, 1.0), 1.0)], 1)
    with pytest.raises(
        InvalidRequest, match="variable: v2; expected: exp_avg, exp_avg_sq, step; actual: exp_avg, step"
    ):
        shard.optimizer.load_state([(k, t) for k, t in shard.optimizer.state() if k != StateKey(2, "exp_avg_sq")])
