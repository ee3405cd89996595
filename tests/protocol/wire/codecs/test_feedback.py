"""Error feedback: nothing is lost, only late; and a convex problem that needs it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.model.spec import DType, Kind
from ps_protocol.wire.codecs import ErrorFeedback, PayloadCodec, payload_runs
from ps_protocol.wire.formats import Wire
from tests.protocol.wire.codecs.support import KEEPING, WIRES, bits, flat_layout, layout_of, region_of
from tests.support.length import examples

MIXED = (
    ((7, 5), DType.FLOAT32, Kind.PARAMETER),
    ((300,), DType.FLOAT32, Kind.PARAMETER),
    ((4, 3), DType.FLOAT64, Kind.PARAMETER),
    ((6,), DType.BFLOAT16, Kind.PARAMETER),
    ((3,), DType.FLOAT32, Kind.BUFFER),
)


def send(feedback: ErrorFeedback, region: torch.Tensor, runs) -> torch.Tensor:
    """What the receiver of one payload decodes, as a region."""
    payload = torch.empty(feedback.payload.encoded_bytes(runs), dtype=torch.uint8)
    feedback.encode(region, runs, payload)
    got = torch.zeros(feedback.layout.region_bytes, dtype=torch.uint8)
    PayloadCodec(feedback.payload.wire).decode(payload, runs, got)
    return got


def slices_of(layout, region: torch.Tensor) -> list[torch.Tensor]:
    return [
        region[s.begin : s.end].view(getattr(torch, s.variable.dtype.value)).view(s.shape).double()
        for s in layout.slices
    ]


@pytest.mark.parametrize("wire", KEEPING, ids=str)
@examples(30)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_the_sum_of_what_arrives_and_the_residual_is_the_sum_of_the_gradients(wire, seed, steps):
    (layout,) = layout_of(*MIXED)
    generator = torch.Generator().manual_seed(seed)
    feedback = ErrorFeedback(PayloadCodec(wire), layout)
    given_, arrived = ([torch.zeros(s.shape, dtype=torch.float64) for s in layout.slices] for _ in range(2))
    for _ in range(steps):
        region = torch.zeros(layout.region_bytes, dtype=torch.uint8)
        for s in layout.slices:
            view = region[s.begin : s.end].view(getattr(torch, s.variable.dtype.value))
            view.copy_(torch.randn(view.shape, generator=generator))
        absent = {i for i in range(layout.parameter_slices) if torch.rand(1, generator=generator) < 0.3}
        before = [None if (r := feedback.residual(i)) is None else r.clone() for i in range(len(layout.slices))]
        got = send(feedback, region, payload_runs(layout, absent))
        for i, (g, d) in enumerate(zip(slices_of(layout, region), slices_of(layout, got), strict=True)):
            if i in absent:
                assert before[i] is None or torch.equal(feedback.residual(i), before[i])
            else:
                given_[i] += g
                arrived[i] += d
    for i in range(len(layout.slices)):
        residual = feedback.residual(i)
        left = 0.0 if residual is None else residual.double()
        torch.testing.assert_close(arrived[i] + left, given_[i], rtol=0, atol=steps * steps * 1e-5)


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_only_coded_parameters_of_formats_that_keep_errors_have_residuals(wire):
    (layout,) = layout_of(*MIXED)
    feedback = ErrorFeedback(PayloadCodec(wire), layout)
    for i, span in enumerate(layout.slices):
        coded = span.variable.kind is Kind.PARAMETER and span.variable.dtype is not DType.BFLOAT16
        residual = feedback.residual(i)
        assert (residual is not None) == (coded and wire.format.value in ("int8", "topk"))
        assert residual is None or (residual.shape == span.shape and not residual.any())


@pytest.mark.parametrize("wire", ["raw", "bf16", "fp16"])
def test_formats_without_memory_send_the_same_gradient_as_the_same_bytes(wire):
    layout = flat_layout(1000)
    feedback, runs = ErrorFeedback(PayloadCodec(Wire.parse(wire)), layout), payload_runs(layout)
    region = region_of(torch.randn(1000, generator=torch.Generator().manual_seed(2)))
    assert bits(send(feedback, region, runs)) == bits(send(feedback, region, runs))


@pytest.mark.parametrize("wire", KEEPING, ids=str)
def test_residuals_saved_per_slice_go_on_under_another_shard_map(wire):
    variable = ((12, 50), DType.FLOAT32, Kind.PARAMETER)
    (one,), two = layout_of(variable), layout_of(variable, shards=2, cuts=3)
    whole = ErrorFeedback(PayloadCodec(wire), one)
    send(whole, region_of(torch.randn(12, 50, generator=torch.Generator().manual_seed(3))), payload_runs(one))
    saved = whole.residual(0).clone()
    assert saved.any()
    for layout in two:
        feedback = ErrorFeedback(PayloadCodec(wire), layout)
        for i, span in enumerate(layout.slices):
            feedback.residual(i).copy_(saved[span.slice.row_begin : span.slice.row_end])
        got = send(feedback, torch.zeros(layout.region_bytes, dtype=torch.uint8), payload_runs(layout))
        for i, (span, arrived) in enumerate(zip(layout.slices, slices_of(layout, got), strict=True)):
            rows = saved[span.slice.row_begin : span.slice.row_end].double()
            torch.testing.assert_close(arrived + feedback.residual(i).double(), rows, rtol=0, atol=1e-6)
    whole.clear()
    assert not whole.residual(0).any()


@pytest.mark.parametrize("wire", KEEPING, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_sent_as_such_and_leaves_no_trace_in_the_residual(wire, bad):
    layout = flat_layout(1000)
    feedback, runs = ErrorFeedback(PayloadCodec(wire), layout), payload_runs(layout)
    gradient = torch.ones(1000)
    gradient[400] = bad
    assert not send(feedback, region_of(gradient), runs).view(torch.float32).isfinite().all()
    assert feedback.residual(0).isfinite().all()
    assert send(feedback, region_of(torch.ones(1000)), runs).view(torch.float32).isfinite().all()


@pytest.mark.parametrize("wire", KEEPING, ids=str)
def test_a_sum_that_overflows_is_sent_as_the_largest_number(wire):
    layout = flat_layout(1000)
    feedback, runs = ErrorFeedback(PayloadCodec(wire), layout), payload_runs(layout)
    huge = torch.full((1000,), torch.finfo(torch.float32).max)
    for _ in range(3):
        assert send(feedback, region_of(huge), runs).view(torch.float32).isfinite().all()
        assert feedback.residual(0).isfinite().all()


@pytest.mark.parametrize("wire", ["topk:0.01", "int8"])
def test_two_workers_reach_the_optimum_of_their_mean_with_error_feedback_and_do_not_without(wire):
    """Where the workers disagree, their gradients are large and cancel; without memory nothing else is ever sent.

    Beznosikov et al., "On Biased Compression for Distributed Learning" (2020), show the like for top-1.
    """
    n, rate = 1000, 0.01
    generator = torch.Generator().manual_seed(11)
    optimum, disagreement = torch.randn(n, generator=generator), torch.zeros(n)
    disagreement[::40] = 1000.0 if wire == "int8" else 4.0
    layout = flat_layout(n)
    runs = payload_runs(layout)

    def distance_after(steps: int, *, with_feedback: bool) -> float:
        senders = [ErrorFeedback(PayloadCodec(Wire.parse(wire)), layout) for _ in range(2)]
        x = torch.zeros(n)
        for _ in range(steps):
            update = torch.zeros(n)
            for sender, sign in zip(senders, (1.0, -1.0), strict=True):
                update += send(sender, region_of(x - (optimum + sign * disagreement)), runs).view(torch.float32) / 2
                if not with_feedback:
                    sender.clear()
            x -= rate * update
        return (x - optimum).norm().item() / optimum.norm().item()

    with_memory, without = distance_after(1500, with_feedback=True), distance_after(1500, with_feedback=False)
    assert with_memory < 0.05
    assert without > 0.9
