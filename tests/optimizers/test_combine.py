"""Several contributions become one, repeatably; buffers follow their policies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import DType, Kind, ModelSpec, ShardMap, Slice, Variable
from ps_server.optimizers.gradients import assign_buffers, average, average_buffers, blend_buffers, shares
from ps_server.state.region import Region
from tests.support.length import examples

from .models import SHAPES, fill, spec_of, whole_layout

FLOATS = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT64, DType.FLOAT16)
ABSENT = st.frozensets(st.integers(0, len(SHAPES) - 1))


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
