"""What users write for a wire format, and its form in messages."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import ConfigError, InvalidRequest
from ps_protocol.v1 import common_pb2 as pb
from ps_protocol.wire.formats import Wire, WireFormat, wire_from_pb, wire_to_pb

WIRES = st.one_of(
    st.sampled_from([Wire(f) for f in WireFormat]),
    st.builds(lambda r: Wire(WireFormat.TOPK, r), st.floats(0, 1, exclude_min=True)),
)


@given(WIRES)
def test_a_wire_comes_back_from_its_text_and_from_its_message(wire):
    assert Wire.parse(str(wire)) == wire
    assert wire_from_pb(wire_to_pb(wire)) == wire


def test_nothing_said_is_raw():
    assert Wire.parse(None) == Wire() == wire_from_pb(pb.Wire()) == Wire(WireFormat.RAW)
    assert Wire.parse("topk") == Wire(WireFormat.TOPK, 0.01)


@pytest.mark.parametrize(
    "text", ["", "int4", "BF16", "int8:0.1", "raw:", "topk:", "topk:x", "topk:0", "topk:1.1", "topk:nan"]
)
def test_another_text_is_refused_with_the_forms_that_are_accepted(text):
    with pytest.raises(ConfigError, match="raw, bf16, fp16, int8, topk, or topk:RATIO") as caught:
        Wire.parse(text)
    assert caught.value.actual == repr(text)


@pytest.mark.parametrize(
    ("wire_format", "ratio"), [(WireFormat.TOPK, 0.0), (WireFormat.TOPK, math.nan), (WireFormat.INT8, 0.5)]
)
def test_a_ratio_that_means_nothing_is_refused(wire_format, ratio):
    with pytest.raises(ConfigError):
        Wire(wire_format, ratio)


def test_the_enum_on_the_wire_has_the_same_members():
    wire = {name.removeprefix("WIRE_FORMAT_") for name in pb.WireFormat.keys()}  # noqa: SIM118
    assert wire == {f.name for f in WireFormat} | {"UNSPECIFIED"}


def test_a_format_of_a_newer_version_is_refused_by_number():
    with pytest.raises(InvalidRequest, match="wire format 99 is not known here") as caught:
        wire_from_pb(pb.Wire(format=99))
    assert caught.value.remedy


@pytest.mark.parametrize("ratio", [0.0, -1.0, 1.5, math.nan])
def test_a_message_with_a_ratio_out_of_range_is_refused(ratio):
    with pytest.raises(InvalidRequest, match="0 < ratio <= 1"):
        wire_from_pb(pb.Wire(format=pb.WIRE_FORMAT_TOPK, ratio=ratio))
