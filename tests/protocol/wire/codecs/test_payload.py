"""Whole payloads: which bytes are coded, where they lie, and what a bad one leaves behind."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import merge, total_bytes
from ps_protocol.model.spec import DType, Kind
from ps_protocol.wire.codecs import PayloadCodec, payload_runs
from ps_protocol.wire.formats import Wire
from tests.protocol.wire.codecs.support import WIRES, bits, flat_layout, layout_of
from tests.support.length import examples

VARIABLES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 6), max_size=2).map(tuple),
        st.sampled_from([DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16, DType.INT64, DType.BOOL]),
        st.sampled_from(Kind),
    ),
    max_size=7,
)
CODED = {DType.FLOAT32, DType.FLOAT64}


def filled(layout, seed: int) -> torch.Tensor:
    """A region with small whole numbers in its float arenas and any bytes elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    region = torch.randint(0, 256, (layout.region_bytes,), dtype=torch.uint8, generator=generator)
    for arena in layout.arenas:
        if arena.key.dtype in CODED and arena.begin < arena.end:
            view = region[arena.begin : arena.end].view(getattr(torch, arena.key.dtype.value))
            view.copy_(torch.randint(-9, 10, view.shape, generator=generator))
    return region


@given(VARIABLES, st.integers(1, 3), st.data())
def test_runs_cover_the_ranges_and_stay_within_one_arena(variables, cuts, data):
    (layout,) = layout_of(*variables, cuts=cuts)
    absent = data.draw(st.sets(st.integers(0, max(0, layout.parameter_slices - 1))))
    for buffers in (True, False):
        runs = payload_runs(layout, absent, buffers=buffers)
        assert merge((run.begin, run.end) for run in runs) == layout.ranges(absent, buffers=buffers)
        for run in runs:
            (arena,) = (a for a in layout.arenas if a.begin <= run.begin and run.end <= a.end and a.begin < a.end)
            coded = arena.key.kind is Kind.PARAMETER and arena.key.dtype in CODED
            assert run.dtype == (arena.key.dtype if coded else None)
        for before, after in pairwise(runs):
            same_arena = any(a.begin < before.end < a.end for a in layout.arenas)
            assert not (same_arena and before.end == after.begin), "two runs where one would do"


@pytest.mark.parametrize("wire", WIRES, ids=str)
@examples(40)
@given(VARIABLES, st.integers(0, 2**32 - 1), st.data())
def test_a_payload_restores_what_is_not_coded_exactly_and_touches_nothing_else(wire, variables, seed, data):
    (layout,) = layout_of(*variables)
    absent = data.draw(st.sets(st.integers(0, max(0, layout.parameter_slices - 1))))
    runs = payload_runs(layout, absent, buffers=data.draw(st.booleans()))
    source, target = filled(layout, seed), filled(layout, seed + 1)
    before = target.clone()
    codec = PayloadCodec(wire)
    payload = bytearray(codec.encoded_bytes(runs))
    codec.encode(source, runs, payload)
    # Bytes, bytearrays, memoryviews and tensors are all taken.
    PayloadCodec(wire).decode(bytes(payload), runs, memoryview(target.numpy()))
    exact = str(wire) in ("raw", "bf16", "fp16", "topk:1.0")
    for run in runs:
        if run.dtype is None or exact:
            assert bits(target[run.begin : run.end]) == bits(source[run.begin : run.end])
        before[run.begin : run.end] = target[run.begin : run.end]
    assert bits(before) == bits(target)


def test_a_raw_payload_is_the_bytes_of_the_ranges():
    (layout,) = layout_of(
        ((3,), DType.FLOAT32, Kind.PARAMETER), ((5,), DType.BOOL, Kind.PARAMETER), ((2,), DType.FLOAT32, Kind.BUFFER)
    )
    source, codec, runs = filled(layout, 1), PayloadCodec(Wire()), payload_runs(layout, {1})
    payload = bytearray(codec.encoded_bytes(runs))
    assert len(payload) == total_bytes(layout.ranges({1}))
    codec.encode(source, runs, payload)
    assert bytes(payload) == b"".join(bits(source[a:b]) for a, b in layout.ranges({1}))


@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize("change", [-1, 1])
def test_a_payload_of_the_wrong_length_is_refused_and_nothing_is_written(wire, change):
    layout = flat_layout(500)
    codec, runs, target = PayloadCodec(wire), payload_runs(layout), filled(layout, 3)
    before = bits(target)
    wrong = bytearray(codec.encoded_bytes(runs) + change)
    for receive in (codec.decode, codec.accumulate):
        with pytest.raises(InvalidRequest, match="wrong length"):
            receive(wrong, runs, target)
    with pytest.raises(InvalidRequest, match="wrong length"):
        codec.encode(target, runs, wrong)
    assert bits(target) == before


@pytest.mark.parametrize("position", [-5, 0, 1, 40, 2**31 - 1])
def test_a_bad_position_in_the_last_run_is_found_before_the_first_is_written(position):
    (layout,) = layout_of(((40,), DType.FLOAT32, Kind.PARAMETER), ((40,), DType.FLOAT64, Kind.PARAMETER))
    codec, runs, target = PayloadCodec(Wire.parse("topk:0.05")), payload_runs(layout), filled(layout, 3)
    payload = torch.zeros(codec.encoded_bytes(runs), dtype=torch.uint8)
    source = torch.zeros(layout.region_bytes, dtype=torch.uint8)
    source[:160].view(torch.float32)[[3, 4]] = 8.0
    codec.encode(source, runs, payload)
    # The last run holds two positions, 0 and 1, then two float64 values; the second comes after 2 × 8 + 4 bytes.
    payload[20:24] = torch.tensor([position], dtype=torch.int32).view(torch.uint8)
    if position == 1:
        codec.decode(payload, runs, target)
        return
    before = bits(target)
    for receive in (codec.decode, codec.accumulate):
        with pytest.raises(InvalidRequest, match="out of range or out of order"):
            receive(payload, runs, target)
    assert bits(target) == before


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_a_payload_without_runs_is_empty(wire):
    codec, nothing = PayloadCodec(wire), torch.zeros(0, dtype=torch.uint8)
    assert codec.encoded_bytes(()) == 0
    codec.encode(nothing, (), b"")
    codec.decode(b"", (), nothing)
