"""What every codec promises, whatever its format."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import InvalidRequest
from ps_protocol.wire.codecs import codec_of
from ps_protocol.wire.codecs.codec import PIECE_ELEMENTS
from ps_protocol.wire.formats import WireFormat
from tests.protocol.wire.codecs.support import WIRES, bits, decoded, encoded, values
from tests.support.length import examples

SINGLE = np.dtype(np.float32)
EVERY_CODEC = pytest.mark.parametrize("wire", WIRES, ids=str)
relaxed = examples(30)


def shifted(data: np.ndarray) -> np.ndarray:
    """The same bytes at an odd address, read-only."""
    moved = np.concatenate([np.zeros(1, np.uint8), data])[1:]
    moved.flags.writeable = False
    return moved


@EVERY_CODEC
@relaxed
@given(values())
def test_what_comes_back_is_within_the_error_that_the_codec_states(wire, source):
    back = decoded(wire, encoded(wire, source), source)
    x, y = source.astype(np.float64), back.astype(np.float64)
    error = np.abs(y - x)
    match wire.format:
        case WireFormat.RAW:
            assert bits(back) == bits(source)
        case WireFormat.BF16 | WireFormat.FP16:
            narrow, digits, least = (
                (torch.bfloat16, 8, 2.0**-134) if wire.format is WireFormat.BF16 else (torch.float16, 11, 2.0**-25)
            )
            limit = torch.finfo(narrow).max
            bound = np.abs(x) * 2.0**-digits * (1 + 2.0**-12) + least
            assert np.all((error <= bound) | ((np.abs(x) > limit) & (y == np.sign(x) * limit)))
        case WireFormat.INT8:
            tiny = float(np.finfo(source.dtype).tiny)
            for begin in range(0, PIECE_ELEMENTS + 256, 256):
                block = slice(begin, begin + 256)
                if not len(x[block]):
                    break
                scale = max(np.abs(x[block]).max() / 127, tiny)
                assert error[block].max() <= scale * (0.5 + 1e-4)
        case WireFormat.TOPK:
            k = max(1, math.ceil(len(x) * wire.ratio))
            kept = np.zeros(len(x), bool)
            kept[np.argsort(-np.abs(x), kind="stable")[:k]] = True
            assert bits(back) == bits(np.where(kept, source, source.dtype.type(0)))


@EVERY_CODEC
@relaxed
@given(values(finite=False))
def test_a_value_that_is_not_finite_is_not_hidden(wire, source):
    back = decoded(wire, encoded(wire, source), source)
    assert np.isfinite(back).all() == np.isfinite(source).all()


@EVERY_CODEC
@relaxed
@given(values())
def test_the_same_values_give_the_same_bytes_whatever_the_address_the_threads_and_the_codecs_past(wire, source):
    data = encoded(wire, source)
    used = codec_of(wire)
    past = np.full(300, -7.0, source.dtype)
    used.encode(past, np.empty(used.encoded_bytes(300, source.dtype), np.uint8))
    again = np.zeros(len(data) + 1, np.uint8)[1:]
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        used.encode(source, again)
        back = decoded(wire, shifted(data), source)
    finally:
        torch.set_num_threads(threads)
    assert bits(again) == bits(data)
    assert bits(back) == bits(decoded(wire, data, source))


@EVERY_CODEC
@relaxed
@given(values(), st.sampled_from([1, -1]), st.booleans())
def test_accumulating_adds_bitwise_what_decoding_gives(wire, source, sign, odd):
    data = encoded(wire, source)
    target = source[::-1] * source.dtype.type(0.7)
    with np.errstate(over="ignore"):
        expected = target + sign * decoded(wire, data, source)
    codec_of(wire).accumulate(shifted(data) if odd else data, target, sign)
    # Not by bits: -0.0 + 0.0 is 0.0, and top-k does not touch what it does not send.
    assert np.array_equal(target, expected)


@EVERY_CODEC
@relaxed
@given(values())
def test_the_pieces_of_a_run_encode_to_the_parts_of_the_whole(wire, source):
    codec, data = codec_of(wire), encoded(wire, source)
    end = 0
    for part, place in codec.pieces(len(source), source.dtype):
        out = np.empty(place.stop - place.start, np.uint8)
        codec.encode_piece(source[part], out)
        assert bits(out) == bits(data[place])
        end = place.stop
    assert end == len(data)


@EVERY_CODEC
def test_zeros_come_back_as_zeros(wire):
    for n in (1, 255, 256, 257, 5000):
        zeros = np.zeros(n, np.float32)
        assert bits(decoded(wire, encoded(wire, zeros), zeros)) == bits(zeros)


@EVERY_CODEC
@pytest.mark.parametrize("change", [-1, 1])
def test_a_wrong_length_is_refused(wire, change):
    codec = codec_of(wire)
    data = encoded(wire, np.ones(1000, np.float32))
    wrong = np.zeros(len(data) + change, np.uint8)
    with pytest.raises(InvalidRequest, match=f"expected: {len(data)} bytes; actual: {len(wrong)} bytes"):
        codec.check(wrong, 1000, SINGLE)
    with pytest.raises(InvalidRequest):
        codec.check(np.zeros(0, np.uint8), 1000, SINGLE)


@EVERY_CODEC
def test_a_billion_elements_are_sized_without_touching_them(wire):
    per_element = {"raw": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1 + 4 / 256}.get(str(wire), 8 * wire.ratio)
    n = 10**9
    assert codec_of(wire).encoded_bytes(n, SINGLE) == pytest.approx(n * per_element, rel=1e-6)
    assert codec_of(wire).encoded_bytes(5 * 2**31, SINGLE) > codec_of(wire).encoded_bytes(n, SINGLE)
