"""Payloads in a wire format at the worker: written once and repeated as they were, received beside the model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.cluster.answers import StepAnswer
from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import DType, Kind, ModelSpec, ShardMap, Slice, Variable
from ps_protocol.wire.codecs import PayloadCodec, Reference, payload_runs
from ps_protocol.wire.formats import Wire
from ps_worker.memory.payloads import Encoder, ReceiveBuffer
from tests.support.length import examples

KEEPING = ["int8", "topk:0.2"]
FORMATS = ["bf16", "fp16", *KEEPING]


def layout_of(*variables: tuple[tuple[int, ...], DType, Kind]) -> Layout:
    made = tuple(Variable(f"v{n}", shape, dtype, kind) for n, (shape, dtype, kind) in enumerate(variables))
    spec = ModelSpec("model", "torch.optim.SGD", made, ({"lr": 0.1},))
    return Layout.of(ShardMap(1, spec, 1, tuple(Slice(n, 0, v.rows, 0) for n, v in enumerate(made))), 0)


LAYOUT = layout_of(
    ((7, 5), DType.FLOAT32, Kind.PARAMETER),
    ((3,), DType.FLOAT16, Kind.PARAMETER),
    ((11,), DType.FLOAT64, Kind.PARAMETER),
    ((), DType.FLOAT32, Kind.PARAMETER),
    ((4,), DType.FLOAT32, Kind.BUFFER),
)


def region(seed: int) -> torch.Tensor:
    """A region with random values of every slice's type."""
    generator, data = torch.Generator().manual_seed(seed), torch.zeros(LAYOUT.region_bytes, dtype=torch.uint8)
    for span in LAYOUT.slices:
        values = torch.randn(span.shape, generator=generator, dtype=torch.float64)
        slice_of(data, span.slice.variable).copy_(values)
    return data


def slice_of(data: torch.Tensor, index: int) -> torch.Tensor:
    span = next(s for s in LAYOUT.slices if s.slice.variable == index)
    return data[span.begin : span.end].view(getattr(torch, span.variable.dtype.value)).view(span.shape)


def index_of(variable: int) -> int:
    return next(i for i, s in enumerate(LAYOUT.slices) if s.slice.variable == variable)


def result(size: int, **fields: object) -> StepAnswer:
    return StepAnswer(payload_bytes=size, **fields)


def arrive(buffer: ReceiveBuffer, payload: bytes, **fields: object) -> None:
    """A result and its payload come, as a transport would bring them."""
    announced = result(len(payload), **fields)
    at = 0
    for piece in buffer.place(announced):
        piece[:] = payload[at : at + len(piece)]
        at += len(piece)
    assert at == len(payload)
    buffer.complete(announced)


def taken(buffer: ReceiveBuffer, sizes: list[int]) -> list[torch.Tensor]:
    targets = [torch.full((size,), 255, dtype=torch.uint8) for size in sizes]
    buffer.take(targets)
    return targets


# -- the encoder


@pytest.mark.parametrize("wire", FORMATS)
def test_a_repeated_push_is_the_same_bytes_and_leaves_nothing_out_twice(wire: str):
    encoder, runs = Encoder(LAYOUT, Wire.parse(wire)), payload_runs(LAYOUT, buffers=False)
    gradients = region(1)
    first = bytes(encoder.encode(1, gradients, runs))
    left = [entry.tensor.clone() for entry in encoder.residuals()]
    gradients.zero_()  # what backward has made of the memory meanwhile
    assert bytes(encoder.encode(1, gradients, runs)) == first
    assert all(torch.equal(e.tensor, before) for e, before in zip(encoder.residuals(), left, strict=True))


@pytest.mark.parametrize("wire", KEEPING)
def test_what_a_push_leaves_out_comes_with_the_next_ones(wire: str):
    codec, encoder = PayloadCodec(Wire.parse(wire)), Encoder(LAYOUT, Wire.parse(wire))
    runs = payload_runs(LAYOUT, buffers=False)
    summed = torch.zeros(LAYOUT.region_bytes, dtype=torch.uint8)
    sent, wanted = [torch.zeros(7, 5), torch.zeros(11)], [torch.zeros(7, 5), torch.zeros(11)]
    for sequence in range(1, 6):
        gradients = region(sequence)
        payload = encoder.encode(sequence, gradients, runs)
        codec.decode(payload, runs, summed)
        for total, got, variable in zip(wanted, sent, (0, 2), strict=True):
            total += slice_of(gradients, variable)
            got += slice_of(summed, variable)
    residuals = {entry.slice_index: entry.tensor for entry in encoder.residuals()}
    for total, got, variable in zip(wanted, sent, (0, 2), strict=True):
        torch.testing.assert_close(got + residuals[index_of(variable)], total, atol=1e-4, rtol=1e-4, check_dtype=False)


@pytest.mark.parametrize("wire", KEEPING)
def test_residuals_taken_to_another_encoder_make_it_go_on_as_this_one(wire: str):
    one, other = Encoder(LAYOUT, Wire.parse(wire)), Encoder(LAYOUT, Wire.parse(wire))
    runs = payload_runs(LAYOUT, buffers=False)
    one.encode(1, region(1), runs)
    other.encode(1, region(7), runs)  # has left something out of its own, which is gone then
    saved = one.residuals()
    other.load_residuals(saved)
    assert [(e.slice_index, e.name) for e in saved] == [(index_of(v), "residual") for v in (0, 3, 2)]
    assert bytes(one.encode(2, region(2), runs)) == bytes(other.encode(2, region(2), runs))


@pytest.mark.parametrize("wire", KEEPING)
def test_a_push_that_is_encoded_by_another_encoder_brings_no_more_than_it_would_have(wire: str):
    one, other = Encoder(LAYOUT, Wire.parse(wire)), Encoder(LAYOUT, Wire.parse(wire))
    runs = payload_runs(LAYOUT, buffers=False)
    one.encode(1, region(1), runs)
    before = [entry.tensor.clone() for entry in one.residuals()]
    gradients = region(2)
    wanted = [slice_of(gradients, v) + r for v, r in zip((0, 3, 2), before, strict=True)]
    one.encode(2, gradients, runs)
    one.take_back(2, gradients)
    other.load_residuals(one.residuals())
    payload = other.encode(2, gradients, runs)
    PayloadCodec(Wire.parse(wire)).decode(payload, runs, gradients)
    for variable, entry, total in zip((0, 3, 2), other.residuals(), wanted, strict=True):
        torch.testing.assert_close(slice_of(gradients, variable) + entry.tensor, total, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("wire", KEEPING)
def test_residuals_that_are_not_given_are_forgotten(wire: str):
    encoder = Encoder(LAYOUT, Wire.parse(wire))
    encoder.encode(1, region(1), payload_runs(LAYOUT, buffers=False))
    assert any(entry.tensor.any() for entry in encoder.residuals())
    encoder.load_residuals([])
    assert not any(entry.tensor.any() for entry in encoder.residuals())


@pytest.mark.parametrize("wire", ["raw", "bf16", "fp16"])
def test_formats_that_round_each_number_have_no_residuals(wire: str):
    encoder = Encoder(LAYOUT, Wire.parse(wire))
    encoder.encode(1, region(1), payload_runs(LAYOUT, buffers=False))
    assert encoder.residuals() == []
    encoder.load_residuals([])


@pytest.mark.parametrize("wire", FORMATS)
def test_pushes_without_some_slices_are_shorter_and_keep_what_those_had_left(wire: str):
    encoder = Encoder(LAYOUT, Wire.parse(wire))
    whole = len(encoder.encode(1, region(1), payload_runs(LAYOUT, buffers=False)))
    before = {e.slice_index: e.tensor.clone() for e in encoder.residuals()}
    absent = (index_of(0),)
    assert len(encoder.encode(2, region(2), payload_runs(LAYOUT, absent, buffers=False))) < whole
    assert len(encoder.encode(3, region(3), payload_runs(LAYOUT, buffers=False))) == whole
    encoder.encode(4, region(4), payload_runs(LAYOUT, range(LAYOUT.parameter_slices), buffers=False))
    if before:
        encoder.load_residuals([])
        encoder.encode(5, region(5), payload_runs(LAYOUT, absent, buffers=False))
        assert not next(e for e in encoder.residuals() if e.slice_index == absent[0]).tensor.any()


# -- the buffer


def test_raw_parameters_land_in_their_places_and_are_taken_end_to_end():
    buffer = ReceiveBuffer(LAYOUT, Wire())
    payload = b"".join(bytes(region(1)[b:e].numpy()) for b, e in LAYOUT.ranges(buffers=False))
    arrive(buffer, payload)
    targets = taken(buffer, [5, 0, len(payload) - 5])
    assert b"".join(bytes(t.numpy()) for t in targets) == payload


def test_what_has_been_taken_is_not_taken_again():
    buffer = ReceiveBuffer(LAYOUT, Wire())
    size = sum(e - b for b, e in LAYOUT.ranges())
    assert buffer.arrived is None
    assert taken(buffer, [size])[0].eq(255).all()
    arrive(buffer, bytes(size), with_buffers=True)
    assert buffer.arrived is not None
    assert not taken(buffer, [size])[0].any()
    assert buffer.arrived is None
    assert taken(buffer, [size])[0].eq(255).all()


def test_what_two_results_bring_is_taken_together():
    """The second leaves out what has not changed since the first, which nobody has taken yet."""
    buffer = ReceiveBuffer(LAYOUT, Wire())
    first, second = region(1), region(2)
    for source, left_out, buffers in ((first, {0, 3}, True), (second, {1, 2, 3}, False)):
        ranges = LAYOUT.ranges(left_out, buffers=buffers)
        payload = b"".join(bytes(source[b:e].numpy()) for b, e in ranges)
        arrive(buffer, payload, absent=sorted(left_out), with_buffers=buffers)
    assert list(buffer.arrived.absent) == [3]
    ranges = LAYOUT.ranges({3})
    (found,) = taken(buffer, [sum(e - b for b, e in ranges)])
    expected = region(1)
    span = LAYOUT.slices[0]
    expected[span.begin : span.end] = second[span.begin : span.end]
    assert torch.equal(found, torch.cat([expected[b:e] for b, e in ranges]))
    assert buffer.arrived is None


def test_a_result_without_payload_is_nothing_to_take():
    buffer = ReceiveBuffer(LAYOUT, Wire())
    buffer.complete(result(0))
    assert buffer.arrived is None


@examples(30)
@given(absent=st.sets(st.integers(0, LAYOUT.parameter_slices - 1)), with_buffers=st.booleans())
def test_only_the_slices_that_came_are_taken(absent: set[int], with_buffers: bool):
    buffer, source = ReceiveBuffer(LAYOUT, Wire()), region(3)
    ranges = LAYOUT.ranges(absent, buffers=with_buffers)
    payload = b"".join(bytes(source[b:e].numpy()) for b, e in ranges)
    arrive(buffer, payload, absent=sorted(absent), with_buffers=with_buffers)
    targets = taken(buffer, [e - b for b, e in ranges])
    assert b"".join(bytes(t.numpy()) for t in targets) == payload


@pytest.mark.parametrize("wire", KEEPING)
def test_differences_are_added_to_what_the_shard_takes_this_worker_to_have(wire: str):
    """The first payload is raw; the model's own parameters may be anything meanwhile."""
    buffer, shard = ReceiveBuffer(LAYOUT, Wire.parse(wire)), Reference(PayloadCodec(Wire.parse(wire)), LAYOUT)
    values, runs = region(1), payload_runs(LAYOUT, buffers=False)
    ranges = LAYOUT.ranges(buffers=False)
    shard.reset(values)
    arrive(buffer, b"".join(bytes(values[b:e].numpy()) for b, e in ranges))
    sizes = [e - b for b, e in ranges]
    for target in taken(buffer, sizes):
        target.zero_()
    for seed in range(2, 5):
        values = region(seed)
        payload = bytearray(shard.payload.encoded_bytes(runs))
        shard.encode(values, runs, payload)
        arrive(buffer, bytes(payload), encoded=True)
        got = torch.zeros(LAYOUT.region_bytes, dtype=torch.uint8)
        buffer.take([got[b:e] for b, e in ranges])
        held = torch.from_numpy(shard.held.copy())
        for variable in (0, 2, 3):
            assert torch.equal(slice_of(got, variable), slice_of(held, variable))
        assert torch.equal(slice_of(got, 1), slice_of(values, 1))  # 16-bit elements are not coded


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_rounded_parameters_land_as_whole_values(wire: str):
    buffer, codec = ReceiveBuffer(LAYOUT, Wire.parse(wire)), PayloadCodec(Wire.parse(wire))
    values, runs = region(1), payload_runs(LAYOUT, buffers=False)
    payload = bytearray(codec.encoded_bytes(runs))
    codec.encode(values, runs, payload)
    for _ in range(2):  # the same again is the same, not twice as much
        arrive(buffer, bytes(payload), encoded=True)
        got = torch.zeros(LAYOUT.region_bytes, dtype=torch.uint8)
        buffer.take([got[b:e] for b, e in LAYOUT.ranges(buffers=False)])
        torch.testing.assert_close(slice_of(got, 0), slice_of(values, 0), rtol=1e-2, atol=1e-2)


@examples(60)
@given(wire=st.sampled_from(FORMATS), size=st.integers(1, 400), data=st.data())
def test_a_payload_that_cannot_be_decoded_is_refused_and_not_taken(wire: str, size: int, data: st.DataObject):
    buffer = ReceiveBuffer(LAYOUT, Wire.parse(wire))
    arrive(buffer, b"".join(bytes(region(1)[b:e].numpy()) for b, e in LAYOUT.ranges(buffers=False)))
    buffer.take([torch.empty(e - b, dtype=torch.uint8) for b, e in LAYOUT.ranges(buffers=False)])
    announced = result(size, encoded=True)
    (piece,) = buffer.place(announced)
    piece[:] = data.draw(st.binary(min_size=len(piece), max_size=len(piece)))
    try:
        buffer.complete(announced)
    except InvalidRequest:
        assert buffer.arrived is None
    else:
        assert buffer.arrived is announced
