"""What happens to gradients before their step: whether they are finite, their norm, clipping, the mean of workers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import DType, Kind, ModelSpec, ShardMap, Slice, Variable
from ps_protocol.wire.means import shares
from ps_server.optimizers.gradients import (
    assign_buffers,
    average,
    average_buffers,
    blend_buffers,
    clip_factor,
    first_nonfinite,
    scale_gradients,
    squared_norm,
    total,
)
from ps_server.state.region import Region, torch_dtype
from ps_server.tables.step import RowStep
from tests.support.length import examples

from .models import SHAPES, fill, spec_of, whole_layout

FLOATS = (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16)
ABSENT = st.frozensets(st.integers(0, len(SHAPES) - 1))

LAYOUT = whole_layout(spec_of("SGD", (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT64, DType.FLOAT16), [{"lr": 0.1}]))
FILLED = [index for index, span in enumerate(LAYOUT.slices) if span.begin < span.end]


@given(
    index=st.sampled_from(FILLED),
    value=st.sampled_from([math.nan, math.inf, -math.inf]),
    place=st.integers(0, 100),
    absent=st.frozensets(st.integers(0, len(SHAPES) - 1)),
)
def test_a_nonfinite_element_is_named_unless_its_slice_is_absent(
    index: int, value: float, place: int, absent: frozenset[int]
) -> None:
    region = Region(LAYOUT)
    flat = region.slice(index).view(-1)
    flat[place % flat.numel()] = value
    expected = None if index in absent else LAYOUT.slices[index].variable.name
    assert first_nonfinite(LAYOUT, region, absent) == expected


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_finite_values_are_finite(sign: int) -> None:
    region = Region(LAYOUT)
    for number, arena in enumerate(LAYOUT.arenas):
        region.arena(number).fill_(sign * torch.finfo(torch_dtype(arena.key.dtype)).max)
    assert first_nonfinite(LAYOUT, region) is None


def test_the_first_of_several_is_named() -> None:
    region = Region(LAYOUT)
    for index in FILLED:
        region.slice(index).fill_(math.nan)
    assert first_nonfinite(LAYOUT, region) == LAYOUT.slices[0].variable.name


def test_an_absent_slice_is_not_named_for_its_neighbour() -> None:
    region = Region(LAYOUT)
    first, *_, last = [index for index in FILLED if LAYOUT.slices[index].arena == 0]
    for index in (first, last):
        region.slice(index).fill_(math.nan)
    assert first_nonfinite(LAYOUT, region, frozenset({first})) == LAYOUT.slices[last].variable.name


@examples(40)
@given(absent=ABSENT, seed=st.integers(0, 9), max_norm=st.sampled_from([0.1, 3.0, 1e6]), rows=st.integers(0, 5))
def test_gradients_are_scaled_as_torch_scales_them(
    absent: frozenset[int], seed: int, max_norm: float, rows: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    layout = whole_layout(spec_of("SGD", (DType.FLOAT32, DType.FLOAT64), [{"lr": 0.1}]))
    region = Region(layout)
    fill(region, generator)
    table = torch.randn(rows, 3, generator=generator)
    parameters = [torch.nn.Parameter(region.slice(index).clone()) for index in range(len(layout.slices))]
    for index, parameter in enumerate(parameters):
        parameter.grad = None if index in absent else region.slice(index).clone()
    embedding = torch.nn.Parameter(table.clone())
    embedding.grad = table.clone()
    before = region.data.clone()
    norm = torch.nn.utils.clip_grad_norm_([*parameters, embedding], max_norm)
    step = RowStep(0, np.arange(rows), table.numpy(), 1, {})
    squared = squared_norm(region, absent, [step])
    assert math.sqrt(squared) == pytest.approx(norm.item(), rel=1e-6)
    scale_gradients(region, absent, clip_factor(max_norm, squared))
    for index, parameter in enumerate(parameters):
        if parameter.grad is not None:
            torch.testing.assert_close(region.slice(index), parameter.grad, rtol=1e-6, atol=1e-7)
    for index in absent:
        span = layout.slices[index]
        assert torch.equal(region.data[span.begin : span.end], before[span.begin : span.end])


def test_squares_of_16_bit_and_of_large_gradients_do_not_overflow() -> None:
    layout = whole_layout(spec_of("SGD", FLOATS, [{"lr": 0.1}]))
    region = Region(layout)
    for index, span in enumerate(layout.slices):
        region.slice(index).fill_(6e4 if span.variable.dtype is DType.FLOAT16 else 1e30)
    elements = {d: sum(math.prod(s.shape) for s in layout.slices if s.variable.dtype is d) for d in FLOATS}
    expected = 3.6e9 * elements[DType.FLOAT16] + 1e60 * sum(n for d, n in elements.items() if d is not DType.FLOAT16)
    assert squared_norm(region, frozenset()) == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize(
    ("squared", "factor"),
    [(0.0, 1.0), (1.0, 1.0), (4.0, 0.5), (math.inf, 0.0), (math.nan, math.nan)],
)
def test_the_factor_is_one_below_the_norm_and_what_torch_makes_of_the_rest(squared: float, factor: float) -> None:
    assert clip_factor(1.0, squared) == pytest.approx(factor, abs=1e-5, nan_ok=True)


def test_a_total_is_the_same_in_every_order_and_has_no_end() -> None:
    parts = [1e16, 1.0, 1.0, 3e-8]
    assert len({total(order) for order in (parts, parts[::-1], [1.0, 1e16, 3e-8, 1.0])}) == 1
    assert total([1.7e308, 1.7e308]) == math.inf
    assert math.isnan(total([1.0, math.nan]))


def contributions(layout: Layout, count: int, seed: int) -> list[Region]:
    generator = torch.Generator().manual_seed(seed)
    regions = [Region(layout) for _ in range(count)]
    for region in regions:
        fill(region, generator)
    return regions


@examples(60)
@given(absent=st.lists(ABSENT, min_size=1, max_size=4), apart=st.booleans(), seed=st.integers(0, 9))
def test_the_mean_is_the_sum_in_order_over_the_count_with_zeros_for_what_is_absent(
    absent: list[frozenset[int]], apart: bool, seed: int
) -> None:
    layout = whole_layout(spec_of("SGD", FLOATS, [{"lr": 0.1}]))
    regions = contributions(layout, len(absent), seed)
    into = Region(layout) if apart else regions[0]
    expected = {}
    for index in range(len(layout.slices)):
        parts = [r.slice(index).clone() for r, missing in zip(regions, absent, strict=True) if index not in missing]
        if parts:
            wide = parts[0].double() if parts[0].dtype == torch.float64 else parts[0].float()
            for part in parts[1:]:
                wide = wide + part
            expected[index] = (wide / len(absent)).to(parts[0].dtype)
    nobody = average(into, regions, absent)
    assert nobody == frozenset.intersection(*absent)
    for index, tensor in expected.items():
        assert torch.equal(into.slice(index), tensor)


def test_a_mean_of_more_elements_than_one_block_is_exact_everywhere() -> None:
    spec = ModelSpec("m", "torch.optim.SGD", (Variable("w", (300_000,), DType.BFLOAT16),), ({"lr": 0.1},))
    regions = contributions(whole_layout(spec), 3, 1)
    expected = ((regions[0].slice(0).float() + regions[1].slice(0) + regions[2].slice(0)) / 3).bfloat16()
    average(regions[0], regions, [frozenset()] * 3)
    assert torch.equal(regions[0].slice(0), expected)


@examples(40)
@given(
    parts=st.lists(st.tuples(ABSENT, st.floats(1e-300, 1e300)), min_size=2, max_size=4),
    apart=st.booleans(),
    seed=st.integers(0, 9),
)
def test_a_weighed_mean_gives_each_part_its_share_with_zeros_for_what_is_absent(
    parts: list[tuple[frozenset[int], float]], apart: bool, seed: int
) -> None:
    layout = whole_layout(spec_of("SGD", FLOATS, [{"lr": 0.1}]))
    regions = contributions(layout, len(parts), seed)
    into = Region(layout) if apart else regions[0]
    absent = [missing for missing, _ in parts]
    weights = shares([weight for _, weight in parts])
    if weights is None:
        return
    assert sum(weights) == pytest.approx(1)
    expected = {}
    for index in range(len(layout.slices)):
        wide = [
            region.slice(index).double() * weight
            for region, missing, weight in zip(regions, absent, weights, strict=True)
            if index not in missing
        ]
        if wide:
            expected[index] = torch.stack(wide).sum(0)
    nobody = average(into, regions, absent, weights)
    assert nobody == frozenset.intersection(*absent)
    for index, tensor in expected.items():
        found = into.slice(index)
        rough = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(found.dtype, 1e-5)
        torch.testing.assert_close(found.double(), tensor, rtol=rough, atol=rough)


def test_equal_weights_are_none_and_the_largest_ones_have_shares() -> None:
    assert shares([32.0, 32.0, 32.0]) is None
    assert shares([1e308, 1e308, 5e307]) == pytest.approx([0.4, 0.4, 0.2])


@pytest.mark.parametrize(("parts", "absent"), [(2, [frozenset[int]()]), (0, [])])
def test_a_mean_of_nothing_or_of_unmatched_contributions_is_refused(parts: int, absent: list[frozenset[int]]) -> None:
    regions = contributions(whole_layout(spec_of("SGD", FLOATS, [{"lr": 0.1}])), 2, 1)
    with pytest.raises(InvalidRequest):
        average(regions[0], regions[:parts], absent)


def buffered(mean: list[float], batches: int) -> Region:
    variables = (
        Variable("weight", (3,), DType.FLOAT32),
        Variable("mean", (2,), DType.FLOAT32, Kind.BUFFER),
        Variable("batches", (), DType.INT64, Kind.BUFFER),
        Variable("empty", (0,), DType.INT32, Kind.BUFFER),
    )
    spec = ModelSpec("m", "torch.optim.SGD", variables, ({"lr": 0.1},))
    layout = Layout.of(ShardMap(1, spec, 1, tuple(Slice(i, 0, v.rows, 0) for i, v in enumerate(variables))), 0)
    region = Region(layout)
    for index, span in enumerate(layout.slices):
        values = {"weight": 7.0, "mean": torch.tensor(mean), "batches": batches, "empty": 0}
        region.slice(index).copy_(torch.as_tensor(values[span.variable.name]))
    return region


def read(region: Region) -> dict[str, object]:
    return {s.variable.name: region.slice(i).tolist() for i, s in enumerate(region.layout.slices)}


def test_assigned_buffers_are_copied_and_parameters_left_alone() -> None:
    region, values = buffered([1.0, 2.0], 5), buffered([3.0, 4.0], 4)
    values.arena(0).zero_()
    assign_buffers(region, values)
    assert read(region) == {"weight": [7.0] * 3, "mean": [3.0, 4.0], "batches": 4, "empty": []}


def test_averaged_buffers_are_the_mean_of_floats_and_the_maximum_of_counters() -> None:
    region = buffered([1.0, 2.0], 5)
    average_buffers(region, [region, buffered([3.0, 4.0], 9), buffered([5.0, 0.0], 2)])
    assert read(region) == {"weight": [7.0] * 3, "mean": [3.0, 2.0], "batches": 9, "empty": []}


def test_blended_buffers_move_part_of_the_way() -> None:
    region = buffered([1.0, 2.0], 5)
    blend_buffers(region, buffered([3.0, 4.0], 3), 0.25)
    assert read(region) == {"weight": [7.0] * 3, "mean": [1.5, 2.5], "batches": 5, "empty": []}
