"""Norms and factors are those of ``torch.nn.utils.clip_grad_norm_``, whatever is absent."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.model.spec import DType
from ps_server.optimizers.gradients import clip_factor, scale_gradients, squared_norm, total
from ps_server.state.region import Region
from ps_server.tables.step import RowStep
from tests.support.length import examples

from .models import SHAPES, fill, spec_of, whole_layout

FLOATS = (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16)
ABSENT = st.frozensets(st.integers(0, len(SHAPES) - 1))


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
