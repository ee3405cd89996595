"""Parameters as differences: both ends hold the same bits, near what the sender has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import InternalError
from ps_protocol.model.spec import DType, Kind
from ps_protocol.wire.codecs import PayloadCodec, Reference, payload_runs
from ps_protocol.wire.formats import Wire, WireFormat
from tests.protocol.wire.codecs.support import KEEPING, bits, flat_layout, layout_of, region_of
from tests.support.length import examples

MIXED = (
    ((700,), DType.FLOAT32, Kind.PARAMETER),
    ((5, 5), DType.FLOAT32, Kind.PARAMETER),
    ((40,), DType.FLOAT64, Kind.PARAMETER),
    ((6,), DType.FLOAT16, Kind.PARAMETER),
    ((3,), DType.INT64, Kind.BUFFER),
)


def transfer(reference: Reference, region: torch.Tensor, runs, receiver: torch.Tensor) -> None:
    payload = bytearray(reference.payload.encoded_bytes(runs))
    reference.encode(region, runs, payload)
    PayloadCodec(reference.payload.wire).accumulate(bytes(payload), runs, receiver)


@pytest.mark.parametrize("wire", KEEPING, ids=str)
@examples(25)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-30, 1.0, 1e30]))
def test_the_receiver_holds_bitwise_what_the_sender_thinks_it_has(wire, seed, size):
    (layout,) = layout_of(*MIXED)
    generator = torch.Generator().manual_seed(seed)
    region = torch.zeros(layout.region_bytes, dtype=torch.uint8)
    coded = [s for s in layout.slices if s.variable.dtype in (DType.FLOAT32, DType.FLOAT64)]
    exact = [s for s in layout.slices if s not in coded]

    def view(of: torch.Tensor, s) -> torch.Tensor:
        return of[s.begin : s.end].view(getattr(torch, s.variable.dtype.value))

    def move(factor: float) -> None:
        for s in coded:
            view(region, s).add_(torch.randn(view(region, s).shape, generator=generator), alpha=factor)

    move(size)
    reference, receiver = Reference(PayloadCodec(wire), layout), region.clone()
    reference.reset(region)
    for _ in range(30):
        move(size / 100)
        for s in exact:
            region[s.begin : s.end] += 1
        absent = {i for i in range(layout.parameter_slices) if torch.rand(1, generator=generator) < 0.2}
        transfer(reference, region, payload_runs(layout, absent), receiver)
        for s in coded:
            assert bits(receiver[s.begin : s.end]) == bits(reference.held[s.begin : s.end])
    before = max((view(region, s) - view(receiver, s)).abs().max().item() for s in coded)
    transfer(reference, region, payload_runs(layout), receiver)
    assert all(bits(receiver[s.begin : s.end]) == bits(region[s.begin : s.end]) for s in exact)
    after = max((view(region, s) - view(receiver, s)).abs().max().item() for s in coded)
    assert after <= (before * 0.501 / 127 + size * 1e-5 if wire.format is WireFormat.INT8 else before)


@pytest.mark.parametrize(("wire", "payloads"), [("int8", 8), ("topk:0.01", 300), ("topk:0.3", 12)])
def test_when_the_parameters_rest_the_receiver_comes_to_have_them(wire, payloads):
    n = 2000
    layout = flat_layout(n)
    generator = torch.Generator().manual_seed(7)
    start, end = torch.randn(n, generator=generator), torch.randn(n, generator=generator)
    reference, receiver = Reference(PayloadCodec(Wire.parse(wire)), layout), start.clone()
    reference.reset(region_of(start))
    for _ in range(payloads):
        transfer(reference, region_of(end), payload_runs(layout), region_of(receiver))
    torch.testing.assert_close(receiver, end, rtol=0, atol=1e-6)


def test_a_difference_before_the_whole_is_a_defect():
    layout = flat_layout(10)
    reference, runs = Reference(PayloadCodec(Wire.parse("int8")), layout), payload_runs(layout)
    assert reference.needs_raw
    with pytest.raises(InternalError):
        reference.encode(torch.zeros(40, dtype=torch.uint8), runs, bytearray(14))


@pytest.mark.parametrize("wire", KEEPING, ids=str)
def test_parameters_that_are_not_finite_arrive_so_and_ask_for_a_raw_payload(wire):
    layout = flat_layout(600)
    runs, region = payload_runs(layout), torch.ones(600)
    reference, receiver = Reference(PayloadCodec(wire), layout), torch.ones(600)
    reference.reset(region_of(region))
    region[5] = float("nan")
    transfer(reference, region_of(region), runs, region_of(receiver))
    assert receiver[5].isnan()
    assert reference.needs_raw
    region[5] = 2.0
    reference.reset(region_of(region))
    receiver.copy_(region)
    assert not reference.needs_raw
    transfer(reference, region_of(region), runs, region_of(receiver))
    assert torch.equal(receiver, region)


@pytest.mark.parametrize("wire", KEEPING, ids=str)
def test_a_difference_that_overflows_is_made_up_in_more_than_one_payload(wire):
    layout = flat_layout(100)
    far = torch.finfo(torch.float32).max / 1.5
    reference, receiver = Reference(PayloadCodec(wire), layout), torch.full((100,), -far)
    reference.reset(region_of(receiver))
    for _ in range(300):
        transfer(reference, region_of(torch.full((100,), far)), payload_runs(layout), region_of(receiver))
        assert not reference.needs_raw
    torch.testing.assert_close(receiver, torch.full((100,), far), rtol=1e-5, atol=0)


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_sixteen_bit_formats_send_the_parameters_themselves(wire):
    layout = flat_layout(50)
    payload, runs = PayloadCodec(Wire.parse(wire)), payload_runs(layout)
    reference, region = Reference(payload, layout), torch.linspace(-3, 3, 50)
    assert not reference.needs_raw
    out, plain, receiver = bytearray(100), bytearray(100), torch.full((50,), 9.0)
    reference.encode(region_of(region), runs, out)
    payload.encode(region_of(region), runs, plain)
    assert out == plain
    payload.decode(out, runs, region_of(receiver))
    torch.testing.assert_close(receiver, region, rtol=2**-8, atol=0)
