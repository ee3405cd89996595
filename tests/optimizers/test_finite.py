"""A NaN or an infinity is found wherever it is, and nothing else is taken for one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.model.spec import DType
from ps_server.optimizers.gradients import first_nonfinite
from ps_server.state.region import Region, torch_dtype

from .models import SHAPES, spec_of, whole_layout

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
