"""The bytes of each format as docs/codecs.md states them, written out by hand; so is what they decode to."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import InvalidRequest
from ps_protocol.wire.codecs import codec_of
from ps_protocol.wire.codecs.built_in import CODECS
from ps_protocol.wire.formats import Wire, WireFormat
from tests.protocol.wire.codecs.support import bits, decoded, encoded


@pytest.mark.parametrize("wire_format", WireFormat)
def test_every_wire_format_has_a_codec(wire_format):
    assert codec_of(Wire(wire_format)).encoded_bytes(100, np.dtype(np.float32)) > 0
    assert set(CODECS) == set(WireFormat)


@pytest.mark.parametrize(
    ("wire", "elements", "data"),
    [
        ("raw", [1.0, -2.5], struct.pack("<2f", 1.0, -2.5)),
        ("bf16", [1.0, -2.5, 1 + 2**-8, 1 + 3 * 2**-8], struct.pack("<4H", 0x3F80, 0xC020, 0x3F80, 0x3F82)),
        ("fp16", [1.0, -2.5, 1e6, 2**-24], struct.pack("<4e", 1.0, -2.5, 65504.0, 2**-24)),
        ("int8", [254.0, -1.0, -3.0, 6.0], struct.pack("<f4b", 2.0, 127, 0, -2, 3)),
        ("topk:0.5", [1.0, -4.0, 4.0, -9.0], struct.pack("<2i2f", 1, 3, -4.0, -9.0)),
    ],
)
def test_the_bytes_are_those_of_the_documentation(wire, elements, data):
    assert bits(encoded(Wire.parse(wire), np.array(elements, np.float32))) == data


def test_int8_has_a_scale_before_each_block_of_256_in_the_type_of_the_elements():
    source = np.array([127.0] * 256 + [-254.0] * 3)
    assert bits(encoded(Wire(WireFormat.INT8), source)) == (
        struct.pack("<d256b", 1.0, *[127] * 256) + struct.pack("<d3b", 2.0, -127, -127, -127)
    )


@given(st.integers(0, 2**32 - 1))
def test_int8_decodes_to_one_product_in_the_type_of_the_elements(seed):
    rng = np.random.default_rng(seed)
    scale = (rng.standard_normal(4) * 10.0 ** rng.integers(-30, 30)).astype(np.float32)
    levels = rng.integers(-127, 128, (4, 256)).astype(np.int8)
    data = b"".join(s.tobytes() + row.tobytes() for s, row in zip(scale, levels, strict=True))
    expected = levels.astype(np.float32) * scale[:, None]
    out = decoded(Wire(WireFormat.INT8), np.frombuffer(data, np.uint8), np.zeros(1024, np.float32))
    assert bits(out) == expected.tobytes()


def test_a_value_that_is_not_finite_spoils_its_block_of_int8_and_no_other():
    source = np.ones(768, np.float32)
    source[300] = math.inf
    out = decoded(Wire(WireFormat.INT8), encoded(Wire(WireFormat.INT8), source), source)
    assert np.isnan(out[256:512]).all()
    assert np.array_equal(out[:256], source[:256])
    assert np.array_equal(out[512:], source[512:])


@pytest.mark.parametrize("positions", [(-1, 2), (2, 100), (5, 5), (7, 3)])
def test_positions_of_top_k_out_of_range_repeated_or_descending_are_refused(positions):
    data = np.frombuffer(struct.pack("<2i2f", *positions, 1.0, 2.0), np.uint8)
    with pytest.raises(InvalidRequest, match=r"positions .* out of range or out of order"):
        codec_of(Wire(WireFormat.TOPK, 0.02)).check(data, 100, np.dtype(np.float32))
