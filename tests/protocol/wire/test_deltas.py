"""A delta gives the state that it was made from, bit for bit, or is refused; no bytes of a stranger break that."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import DamagedData, InvalidRequest
from ps_protocol.wire import deltas
from ps_protocol.wire.deltas import HEADER_BYTES, Encoding, apply_delta, checksum, encode_delta, read_header
from tests.support.length import examples
from tests.support.seeds import drawn_seed

SIZE = 3 * deltas._BLOCK_BYTES + 12_345
_GUARD = b"\xa5" * 64


def applied(base: bytes, delta: bytes) -> bytes:
    """What a delta makes of ``base``. Nothing beside its memory is written."""
    memory = bytearray(_GUARD + bytes(len(base)) + _GUARD)
    kept = bytes(base)
    try:
        apply_delta(base, delta, memoryview(memory)[len(_GUARD) : len(_GUARD) + len(base)])
    finally:
        assert base == kept
        assert memory[: len(_GUARD)] == memory[len(_GUARD) + len(base) :] == _GUARD
    return bytes(memory[len(_GUARD) : len(_GUARD) + len(base)])


def read_as_written(base: bytes, delta: bytes) -> bytes:
    """A reader in plain Python, from the description of the format."""
    magic, number, size, changed, gaps, _, result, seal = struct.unpack("<4sB3xQQQ16s16sQ", delta[:72])
    frame = delta[72:]
    assert (magic, size) == (b"psd1", len(base))
    assert seal == xxhash.xxh3_64_intdigest(delta[:64] + frame)
    raw = zstandard.ZstdDecompressor().decompressobj().decompress(frame)
    made = bytearray(base)
    if number == 2:
        made = bytearray(a ^ b for a, b in zip(base, raw, strict=True))
    else:
        values, place = iter(raw[2 * gaps :]), 0
        for gap in (low | high << 8 for low, high in zip(raw[:gaps], raw[gaps : 2 * gaps], strict=True)):
            place += gap
            if gap < 65535:
                made[place] = next(values) ^ (made[place] if number == 1 else 0)
                place += 1
        assert len(list(values)) == 0
        assert len(raw) == 2 * gaps + changed
    assert xxhash.xxh3_128(bytes(made)).digest() == result
    return bytes(made)


def sealed(delta: bytes, *, frame: bytes | None = None, **fields: int | bytes) -> bytes:
    """``delta`` with other fields, or another frame, and a checksum over all that is right."""
    names = ("magic", "encoding", "size", "changed", "gaps", "base", "result")
    head = dict(zip(names, deltas._HEADER.unpack(delta[: deltas._HEADER.size]), strict=True)) | fields
    frame = delta[HEADER_BYTES:] if frame is None else frame
    packed = deltas._HEADER.pack(*head.values())
    return packed + deltas._seal(packed, frame) + frame


@st.composite
def states(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A base, and a state of the same size that differs from it here and there, in places or everywhere."""
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    size = draw(st.sampled_from([0, 1, 7, 8, 9, 63, 500, 5000, 65_536, 140_000, SIZE]))
    base = random.integers(0, 256, size, dtype=np.uint8) * np.uint8(draw(st.booleans()))
    new = base.copy()
    share = draw(st.sampled_from([0.0, 1e-5, 1e-3, 0.02, 0.1, 0.3, 1.0]))
    chosen = np.flatnonzero(random.random(size) < share)
    new[chosen] ^= random.integers(1, draw(st.sampled_from([2, 4, 256])), len(chosen), dtype=np.uint8)
    for at in draw(st.lists(st.integers(0, max(size - 1, 0)), max_size=3 if size else 0)):
        new[at] ^= 255
    return base.tobytes(), new.tobytes()


@examples(200)
@given(states(), st.sampled_from([1, 1, 3]))
def test_a_delta_gives_the_new_state_and_is_smaller_than_it(both: tuple[bytes, bytes], level: int):
    base, new = both
    delta = encode_delta(base, new, level=level)
    if delta is None:
        return
    header = read_header(delta)
    assert (header.size, header.base, header.result) == (len(new), checksum(base), checksum(new))
    assert header.changed == np.count_nonzero(np.frombuffer(base, np.uint8) != np.frombuffer(new, np.uint8))
    assert len(delta) < len(new)
    assert applied(base, delta) == new
    if len(base) < 200_000:
        assert read_as_written(base, delta) == new


@given(st.binary(max_size=400), st.binary(max_size=400))
def test_any_two_states_of_one_size_have_a_delta_or_are_sent_whole(base: bytes, new: bytes):
    size = min(len(base), len(new))
    delta = encode_delta(base[:size], new[:size])
    assert delta is None or applied(base[:size], delta) == new[:size]


def _sparse(size: int, places: list[int], base: bytes | None = None, value: Callable[[int], int] = lambda old: old ^ 1):
    base = base or bytes(size)
    new = bytearray(base)
    for place in places:
        new[place] = value(new[place])
    return base, bytes(new)


BLOCK = deltas._BLOCK_BYTES


@pytest.mark.parametrize(
    "places",
    [
        [0],
        [SIZE - 1],
        [0, SIZE - 1],
        [65_534],
        [65_535],
        [65_536],
        [0, 65_536],
        [0, 65_537],
        [131_070],
        [131_071],
        [BLOCK - 1, BLOCK],
        [BLOCK - 65_536, 2 * BLOCK],
        [BLOCK - 65_535, BLOCK + 65_536],
        [2 * BLOCK + 1],
        [],
    ],
)
def test_gaps_of_any_length_lead_to_the_bytes_that_changed(places):
    base, new = _sparse(SIZE, places)
    delta = encode_delta(base, new)
    assert delta is not None
    assert len(delta) < 200
    assert read_header(delta).changed == len(places)
    assert applied(base, delta) == read_as_written(base, delta) == new


def test_the_smallest_of_the_encodings_is_taken():
    random = np.random.default_rng(drawn_seed())
    base = random.integers(0, 256, 200_000, dtype=np.uint8)
    some = np.sort(random.choice(len(base), 2000, replace=False))
    overwritten, flipped, all_flipped = base.copy(), base.copy(), base ^ (random.random(len(base)) < 0.6)
    overwritten[some] = 7
    flipped[some] ^= 1
    chosen = []
    for new in (overwritten, flipped, all_flipped):
        delta = encode_delta(base.tobytes(), new.tobytes())
        assert delta is not None
        chosen.append(read_header(delta).encoding)
        assert applied(base.tobytes(), delta) == new.tobytes()
    assert chosen == [Encoding.OVERWRITE, Encoding.XOR, Encoding.DENSE_XOR]
    assert encode_delta(base.tobytes(), random.integers(0, 256, len(base), dtype=np.uint8).tobytes()) is None


def test_low_bits_of_bf16_weights_take_little_more_than_a_byte_each():
    generator = torch.Generator().manual_seed(drawn_seed())
    base = torch.randn(500_000, generator=generator).bfloat16().view(torch.int16)
    new = base + (torch.rand(len(base), generator=generator) < 0.01).short()
    one, other = base.numpy().tobytes(), new.numpy().tobytes()
    delta = encode_delta(one, other)
    assert delta is not None
    assert len(delta) < 0.01 * len(other)
    assert applied(one, delta) == other


def test_payloads_of_nan_and_signs_of_zero_are_exact():
    words = np.arange(1 << 16, dtype=np.uint16)
    base = words.tobytes()
    for at in range(0, len(words), 1000):
        delta = encode_delta(base, (words ^ (np.arange(1 << 16) == at)).astype(np.uint16).tobytes())
        assert delta is not None
        assert applied(base, delta) == (words ^ (np.arange(1 << 16) == at)).astype(np.uint16).tobytes()


def test_memory_at_any_address_and_that_can_only_be_read_will_do():
    base, new = _sparse(10_000, [3, 5000, 9999])
    delta = encode_delta(memoryview(b"xyz" + base)[3:], memoryview(b"x" + new)[1:])
    assert delta is not None
    memory = bytearray(10_001)
    apply_delta(memoryview(b"x" + base)[1:], memoryview(b"xyz" + delta)[3:], memoryview(memory)[1:])
    assert memory[1:] == new
    tensor = torch.frombuffer(bytearray(base), dtype=torch.int16)
    out = torch.empty_like(tensor)
    apply_delta(tensor.numpy().data.cast("B"), delta, out.numpy().data.cast("B"))
    assert out.numpy().tobytes() == new


def test_every_flipped_bit_is_refused_and_every_cut():
    base, new = _sparse(2000, [3, 4, 700, 1999], bytes(range(200)) * 10)
    delta = encode_delta(base, new)
    assert delta is not None
    for bit in range(8 * len(delta)):
        hurt = bytearray(delta)
        hurt[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedData, match="remedy: ask for the full version"):
            applied(base, bytes(hurt))
    for length in range(len(delta)):
        with pytest.raises(DamagedData):
            applied(base, delta[:length])
    with pytest.raises(DamagedData, match="checksum"):
        applied(base, delta + b"\0")


@pytest.mark.parametrize("encoding", list(Encoding))
def test_no_delta_of_a_stranger_writes_other_values_or_beside_the_result(encoding):
    """All have the checksum of their bytes: what is refused is refused for what it says."""
    random = np.random.default_rng(drawn_seed())
    base = bytes(range(256)) * 40
    base, new = _sparse(len(base), [3, 4, 700, 9999], base)
    delta = _encoded(base, new, encoding)
    refused = 0
    raw = zstandard.ZstdDecompressor().decompressobj().decompress(delta[HEADER_BYTES:])
    for number in range(600):
        hurt, head = bytearray(raw), {}
        for _ in range(random.integers(1, 4)):
            hurt[random.integers(len(hurt))] ^= 1 << random.integers(8)
        if number % 3 == 0:
            name = ("encoding", "size", "changed", "gaps")[random.integers(4)]
            most = 256 if name == "encoding" else 1 << random.integers(1, 63)
            head = {name: int(random.integers(most))}
        frame = zstandard.ZstdCompressor().compress(bytes(hurt))
        if number % 5 == 0:
            frame = bytearray(frame)
            frame[random.integers(len(frame))] ^= 1 << random.integers(8)
        try:
            assert applied(base, sealed(delta, frame=bytes(frame), **head)) == new
        except (DamagedData, InvalidRequest):
            refused += 1
    assert refused > 500


def _encoded(base: bytes, new: bytes, encoding: Encoding) -> bytes:
    """A delta in an encoding that may not be the smallest."""
    plain = encode_delta(base, new)
    assert plain is not None
    if encoding is Encoding.DENSE_XOR:
        raw = bytes(a ^ b for a, b in zip(base, new, strict=True))
        return sealed(plain, frame=zstandard.ZstdCompressor().compress(raw), encoding=2, gaps=0)
    gaps = read_header(plain).gaps
    raw = bytearray(zstandard.ZstdDecompressor().decompressobj().decompress(plain[HEADER_BYTES:]))
    places = [at for at in range(len(base)) if base[at] != new[at]]
    raw[2 * gaps :] = bytes(new[at] ^ (base[at] if encoding is Encoding.XOR else 0) for at in places)
    return sealed(plain, frame=zstandard.ZstdCompressor().compress(bytes(raw)), encoding=int(encoding))


@pytest.mark.parametrize("encoding", list(Encoding))
def test_each_encoding_is_read(encoding):
    base, new = _sparse(10_240, [3, 4, 700, 9999], bytes(range(256)) * 40)
    delta = _encoded(base, new, encoding)
    assert read_header(delta).encoding is encoding
    assert applied(base, delta) == read_as_written(base, delta) == new


def test_a_frame_that_unpacks_to_more_than_it_may_is_not_unpacked():
    base, new = _sparse(10_240, [3, 4, 700, 9999])
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    for encoding in Encoding:
        with pytest.raises(DamagedData, match="longer than what changed"):
            applied(base, sealed(_encoded(base, new, encoding), frame=bomb))
    with pytest.raises(DamagedData, match="shorter than what changed"):
        applied(base, sealed(_encoded(base, new, Encoding.XOR), frame=zstandard.ZstdCompressor().compress(b"12345")))
    with pytest.raises(InvalidRequest, match="another size"):
        applied(base, sealed(_encoded(base, new, Encoding.DENSE_XOR), size=1 << 40))
    with pytest.raises(DamagedData, match="changes 4 bytes"):
        applied(base, sealed(_encoded(base, new, Encoding.XOR), gaps=1 << 40))
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=27)
    wide = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = wide.compress(bytes(1 << 20)) + wide.flush()
    with pytest.raises(DamagedData, match="cannot be decompressed"):
        applied(base, sealed(_encoded(base, new, Encoding.XOR), frame=frame))


def test_changes_that_lead_behind_the_end_or_stop_before_it_are_refused():
    base, new = _sparse(10_240, [3, 4, 700, 9999])
    delta = _encoded(base, new, Encoding.OVERWRITE)
    for gaps in ([3, 0, 695, 9999], [0xFFFF] * 4, [3, 0, 0xFFFF, 1]):
        raw = bytes(gap & 0xFF for gap in gaps) + bytes(gap >> 8 for gap in gaps) + bytes(4)
        with pytest.raises(DamagedData, match=r"\d changes of 4 are in 10240 bytes"):
            applied(base, sealed(delta, frame=zstandard.ZstdCompressor().compress(raw)))


def test_another_base_is_told_from_damage():
    base, new = _sparse(10_240, [3, 4, 700, 9999])
    delta = encode_delta(base, new)
    assert delta is not None
    other = b"\1" + base[1:]
    with pytest.raises(InvalidRequest, match="another base") as refused:
        applied(other, delta)
    assert checksum(base).hex() in refused.value.expected
    assert checksum(other).hex() in refused.value.actual
    with pytest.raises(DamagedData, match="the checksum that it names"):
        applied(base, sealed(delta, result=bytes(16)))


def test_what_does_not_fit_is_refused_before_anything_is_written():
    base, new = _sparse(10_240, [3, 4, 700, 9999])
    delta = encode_delta(base, new)
    assert delta is not None
    with pytest.raises(InvalidRequest, match="another size"):
        encode_delta(base, new[1:])
    for level in (0, 20, -1):
        with pytest.raises(InvalidRequest, match="level"):
            encode_delta(base, new, level=level)
    with pytest.raises(InvalidRequest, match="another size"):
        apply_delta(base, delta, bytearray(10_241))
    with pytest.raises(InvalidRequest, match="another size"):
        apply_delta(base[1:], delta, bytearray(10_240))
    memory = bytearray(base)
    with pytest.raises(InvalidRequest, match="memory beside its base"):
        apply_delta(memory, delta, memory)
    with pytest.raises(InvalidRequest, match="memory beside its base"):
        apply_delta(base, delta, memoryview(bytes(10_240)))  # type: ignore[arg-type]
    assert memory == base
    with pytest.raises(DamagedData, match="format"):
        read_header(b"psd2" + delta[4:])


def test_the_highest_level_is_read_with_the_memory_that_a_reader_grants():
    random = np.random.default_rng(drawn_seed())
    base = np.zeros(20 << 20, np.uint8)
    new = np.repeat(random.integers(0, 3, len(base) // 64, dtype=np.uint8), 64)
    delta = encode_delta(base.data, new.data, level=1)
    assert delta is not None
    packer = zstandard.ZstdCompressor(level=deltas.LEVELS[-1]).compressobj()
    frame = packer.compress(new[: 9 << 20].data) + packer.flush()
    reader = zstandard.ZstdDecompressor(max_window_size=deltas._WINDOW_BYTES).stream_reader(frame)
    assert len(reader.read()) == 9 << 20
    out = np.empty_like(base)
    apply_delta(base.data, delta, out.data)
    assert (out == new).all()


def test_the_checksum_is_that_of_other_programs():
    assert checksum(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert checksum(b"abc") == bytes.fromhex(xxhash.xxh3_128_hexdigest(b"abc"))
