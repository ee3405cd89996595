"""The codecs, and the wire format of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.wire.codecs.codec import Bytes, Codec, DTypeOf, Elements, silent
from ps_protocol.wire.formats import Wire, WireFormat


class RawCodec(Codec):
    """Copies bytes; takes any dtype. Called as every Codec is."""

    def piece_bytes(self, elements: int, dtype: DTypeOf) -> int:
        """As many as in memory."""
        return elements * dtype.itemsize

    def encode_piece(self, source: Elements, out: Bytes) -> None:
        """Copy."""
        np.copyto(out, source.view(np.uint8))

    def decode_piece(self, data: Bytes, out: Elements) -> None:
        """Copy."""
        np.copyto(out.view(np.uint8), data)

    def accumulate_piece(self, data: Bytes, out: Elements, sign: int) -> None:
        """Add."""
        with silent():
            (np.add if sign > 0 else np.subtract)(out, data.view(out.dtype), out=out)


_HALF = np.dtype(np.int16)
_MAGNITUDE = np.int16(0x7FFF)
_SINGLE = np.dtype(np.float32)


class CastCodec(Codec):
    """Rounds to ``narrow``, to nearest even; float64 is rounded to float32 first. Called as every Codec is.

    A finite value beyond the largest of ``narrow`` becomes that largest value (65504 for float16); NaN and infinities
    stay what they are. The relative error is at most 2^-8 for bfloat16 and 2^-11 for float16; float16 rounds what is
    smaller than 2^-14 to a multiple of 2^-24.

    Nothing is kept of the error: it is at most a fixed share of each element, so small elements are not drowned by
    large neighbours as in a block of int8, nor left out as in top-k. Residuals would cost the memory of the gradients.
    """

    #: Below the size from which torch would use several threads.
    piece_elements = (1 << 15) - 256

    def __init__(self, narrow: torch.dtype) -> None:
        super().__init__()
        self._narrow = narrow
        #: Its bits; those of NaN are above them.
        self._infinity = int(torch.tensor(torch.inf, dtype=narrow).view(torch.int16))

    def piece_bytes(self, elements: int, dtype: DTypeOf) -> int:
        """Two an element."""
        return elements * _HALF.itemsize

    def encode_piece(self, source: Elements, out: Bytes) -> None:
        """Round."""
        halves = out.view(_HALF)
        target = halves if halves.flags.aligned else self.scratch(len(source), _HALF, "narrow")
        self._round(source, target)
        magnitudes = np.bitwise_and(target, _MAGNITUDE, out=self.scratch(len(source), _HALF, "magnitudes"))
        if magnitudes.max() >= self._infinity:
            limit = torch.finfo(self._narrow).max
            self._round(np.where(np.isfinite(source), source.clip(-limit, limit), source), target)
        if target is not halves:
            np.copyto(halves, target)

    def decode_piece(self, data: Bytes, out: Elements) -> None:
        """Widen; exact."""
        halves = data.view(_HALF)
        if not (halves.flags.aligned and halves.flags.writeable):
            halves = self._copy(halves, _HALF, "narrow")
        torch.from_numpy(out).copy_(torch.from_numpy(halves).view(self._narrow))

    def accumulate_piece(self, data: Bytes, out: Elements, sign: int) -> None:
        """Widen and add."""
        wide = self.scratch(len(out), out.dtype, "wide")
        self.decode_piece(data, wide)
        with silent():
            (np.add if sign > 0 else np.subtract)(out, wide, out=out)

    def _round(self, source: Elements, target: Elements) -> None:
        """Set the 16-bit ``target`` to ``source``; what is too large becomes infinity."""
        if source.dtype != _SINGLE or not source.flags.writeable:
            # Float64 goes by float32 on every machine: torch does not say how it rounds.
            source = self._copy(source, _SINGLE, "single")
        torch.from_numpy(target).view(self._narrow).copy_(torch.from_numpy(source))

    def _copy(self, values: Elements, dtype: DTypeOf, use: str) -> Elements:
        """``values`` as ``dtype`` in memory that torch takes: aligned and writable."""
        copy = self.scratch(len(values), dtype, use)
        with silent():
            np.copyto(copy, values, casting="same_kind")
        return copy


BLOCK_ELEMENTS = 256
LEVELS = 127


class Int8Codec(Codec):
    """Each block: its scale, absmax / 127, in the type of the elements, then one int8 per element, value / scale
    rounded to nearest even. The last block may be shorter. Called as every Codec is.

    Block-wise absmax quantisation of Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022), here with
    evenly spaced levels. Dettmers, "8-Bit Approximations for Parallelism in Deep Learning" (2016), sends gradients so.

    Block-wise absmax quantisation of Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022), here with
    evenly spaced levels. Dettmers, "8-Bit Approximations for Parallelism in Deep Learning" (2016), sends gradients so.

    The error of an element is at most half the scale of its block, up to float rounding. Scales are kept between the
    smallest normal number and max / 127.25, so that blocks of denormals and of huge values stay finite; the error in a
    block of denormals is at most half the smallest normal number. A block with a NaN or an infinity decodes to NaN.
    """

    keeps_error = True

    def piece_bytes(self, elements: int, dtype: DTypeOf) -> int:
        """One an element and one scale a block."""
        return elements + -(-elements // BLOCK_ELEMENTS) * dtype.itemsize

    def encode_piece(self, source: Elements, out: Bytes) -> None:
        """Quantise."""
        with silent():
            for values, block in _blocks(source, out):
                self._quantise(values, block)

    def decode_piece(self, data: Bytes, out: Elements) -> None:
        """Each int8 times its scale."""
        with silent():
            for values, block in _blocks(out, data):
                _dequantise(block, values)

    def accumulate_piece(self, data: Bytes, out: Elements, sign: int) -> None:
        """Each int8 times its scale, added."""
        with silent():
            for values, block in _blocks(out, data):
                decoded = self.scratch(values.size, values.dtype, "values").reshape(values.shape)
                _dequantise(block, decoded)
                (np.add if sign > 0 else np.subtract)(values, decoded, out=values)

    def _quantise(self, values: Elements, block: Bytes) -> None:
        """Write the rows ``values`` to the rows ``block``."""
        info, width = np.finfo(values.dtype), values.dtype.itemsize
        levels = self.scratch(values.size, values.dtype, "values").reshape(values.shape)
        peak = np.abs(values, out=levels).max(axis=1)
        # The reciprocals of both limits, and 127 times them, are finite; the largest value over the upper one is 127.
        scale = np.clip(peak / LEVELS, info.tiny, info.max / (LEVELS + 0.25)).astype(values.dtype, copy=False)
        np.multiply(values, (1.0 / scale)[:, np.newaxis], out=levels)
        np.rint(levels, out=levels)
        broken = ~np.isfinite(peak)
        if broken.any():
            levels[broken] = 0.0
            scale[broken] = np.nan
        block[:, :width] = scale.view(np.uint8).reshape(-1, width)
        np.copyto(block[:, width:].view(np.int8), levels, casting="unsafe")


def _blocks(values: Elements, data: Bytes) -> list[tuple[Elements, Bytes]]:
    """The whole blocks of a piece and the shorter last one: elements and bytes, both [blocks, width]."""
    full, rest = divmod(len(values), BLOCK_ELEMENTS)
    elements, size = full * BLOCK_ELEMENTS, full * (BLOCK_ELEMENTS + values.dtype.itemsize)
    parts = []
    if full:
        parts.append((values[:elements].reshape(full, -1), data[:size].reshape(full, -1)))
    if rest:
        parts.append((values[elements:].reshape(1, -1), data[size:].reshape(1, -1)))
    return parts


def _dequantise(block: Bytes, out: Elements) -> None:
    """Set ``out`` to what the rows ``block`` stand for."""
    width = out.dtype.itemsize
    scale = np.ascontiguousarray(block[:, :width]).view(out.dtype)
    np.copyto(out, block[:, width:].view(np.int8))
    np.multiply(out, scale, out=out)


Indexes = npt.NDArray[np.int64]
#: Bits of a magnitude as a signed integer: ordered as the magnitudes are, infinity above all numbers, NaN above it.
Keys = npt.NDArray[Any]

_SCAN_ELEMENTS = 1 << 18
_SAMPLE_ELEMENTS = 1 << 16


def largest(values: Elements, k: int) -> Indexes:
    """Positions of the ``k`` elements of largest magnitude in ``values``, ascending.

    Of equal magnitudes the first are taken; NaN counts as larger than infinity. ``values`` is flat, float32 or
    float64; 1 <= ``k`` <= its length. Temporaries are of the order of ``k``.

    A threshold is guessed from a sample, as in Lin et al., "Deep Gradient Compression" (2018); here the guess decides
    how long it takes, never the result.
    """
    bits = values.view(np.int32 if values.dtype == np.float32 else np.int64)
    floor = _guess(bits, k)
    found = _scan(bits, k, floor)
    if len(found) < k and floor > 1:
        found = _scan(bits, k, 1)
    return found if len(found) == k else _with_zeros(found, k)


def _guess(bits: Keys, k: int) -> int:
    """A key that probably a few more than ``k`` elements reach; at least 1, the smallest key that is not zero."""
    if len(bits) <= _SCAN_ELEMENTS:
        return 1
    # Odd, so that no power-of-two row length is hit at the same column each time.
    stride = len(bits) // _SAMPLE_ELEMENTS | 1
    sample = bits[::stride] & np.iinfo(bits.dtype).max
    expected = len(sample) * k / len(bits)
    rank = math.ceil(expected + 4.0 * math.sqrt(expected) + 4.0)
    if rank >= len(sample):
        return 1
    return max(1, int(np.partition(sample, len(sample) - rank)[len(sample) - rank]))


def _scan(bits: Keys, k: int, floor: int) -> Indexes:
    """Positions of the ``k`` largest keys from ``floor`` up, ascending; fewer where there are fewer."""
    magnitude = np.iinfo(bits.dtype).max
    keys = np.empty(min(_SCAN_ELEMENTS, len(bits)), bits.dtype)
    reached = np.empty(len(keys), np.bool_)
    found: list[Indexes] = []
    found_keys: list[Keys] = []
    count = 0
    for begin in range(0, len(bits), _SCAN_ELEMENTS):
        chunk = bits[begin : begin + _SCAN_ELEMENTS]
        n = len(chunk)
        np.bitwise_and(chunk, magnitude, out=keys[:n])
        np.greater_equal(keys[:n], floor, out=reached[:n])
        hits = np.flatnonzero(reached[:n])
        found.append(hits + begin)
        found_keys.append(keys[hits])
        count += len(hits)
        if count > 4 * k + _SCAN_ELEMENTS:
            best, best_keys = _first_largest(np.concatenate(found), np.concatenate(found_keys), k)
            found, found_keys, count = [best], [best_keys], k
            # From here on an equal key comes later than k others, so it loses.
            floor = int(best_keys.min()) + 1
    every, every_keys = np.concatenate(found), np.concatenate(found_keys)
    return every if count <= k else _first_largest(every, every_keys, k)[0]


def _first_largest(positions: Indexes, keys: Keys, k: int) -> tuple[Indexes, Keys]:
    """The ``k`` largest keys, the first ones of those that are equal to the last; ascending positions stay so."""
    bound = np.partition(keys, len(keys) - k)[len(keys) - k]
    taken = keys > bound
    ties = np.flatnonzero(keys == bound)[: k - int(np.count_nonzero(taken))]
    taken[ties] = True
    return positions[taken], keys[taken]


def _with_zeros(found: Indexes, k: int) -> Indexes:
    """``found``, all elements that are not zero, and the first zeros that make it ``k``."""
    zeros = np.setdiff1d(np.arange(k, dtype=np.int64), found, assume_unique=True)[: k - len(found)]
    return np.sort(np.concatenate([found, zeros]))


_POSITION = np.dtype(np.int32)


class TopKCodec(Codec):
    """k = max(1, ceil(n × ratio)) positions, int32, ascending, then the k values, exact. Called as every Codec is.

    Aji and Heafield, "Sparse Communication for Distributed Gradient Descent" (2017).

    Aji and Heafield, "Sparse Communication for Distributed Gradient Descent" (2017).

    Of equal magnitudes the first are taken, NaN before infinity before numbers. Decoding sets the others to zero.
    """

    keeps_error = True
    #: What an int32 can point at.
    piece_elements = 1 << 31

    def __init__(self, ratio: float) -> None:
        super().__init__()
        self._ratio = ratio

    def piece_bytes(self, elements: int, dtype: DTypeOf) -> int:
        """A position and a value for each that is sent."""
        return self._kept(elements) * (_POSITION.itemsize + dtype.itemsize)

    def encode_piece(self, source: Elements, out: Bytes) -> None:
        """Select."""
        chosen = largest(source, self._kept(len(source)))
        split = len(chosen) * _POSITION.itemsize
        out[:split] = chosen.astype(_POSITION).view(np.uint8)
        out[split:] = source[chosen].view(np.uint8)

    def check_piece(self, data: Bytes, elements: int, dtype: DTypeOf) -> None:
        """Raise InvalidRequest unless the length is right and the positions ascend within the piece."""
        super().check_piece(data, elements, dtype)
        positions = self._positions(data, elements)
        if positions[0] < 0 or positions[-1] >= elements or bool((positions[1:] <= positions[:-1]).any()):
            raise InvalidRequest(
                "the positions of a top-k payload are out of range or out of order",
                expected=f"ascending positions from 0 to {elements - 1}",
                actual=f"{positions[0]} to {positions[-1]}",
            )

    def decode_piece(self, data: Bytes, out: Elements) -> None:
        """The values at their positions, zero elsewhere."""
        out.fill(0)
        out[self._positions(data, len(out))] = self._values(data, out)

    def accumulate_piece(self, data: Bytes, out: Elements, sign: int) -> None:
        """Add the values at their positions."""
        positions, values = self._positions(data, len(out)), self._values(data, out)
        with silent():
            # No position comes twice.
            out[positions] += values if sign > 0 else -values

    def _kept(self, elements: int) -> int:
        return min(elements, max(1, math.ceil(elements * self._ratio)))

    def _positions(self, data: Bytes, elements: int) -> npt.NDArray[np.int32]:
        return data[: self._kept(elements) * _POSITION.itemsize].view(_POSITION)

    def _values(self, data: Bytes, like: Elements) -> Elements:
        return data[self._kept(len(like)) * _POSITION.itemsize :].view(like.dtype)


CODECS: Mapping[WireFormat, Callable[[Wire], Codec]] = MappingProxyType(
    {
        WireFormat.RAW: lambda wire: RawCodec(),
        WireFormat.BF16: lambda wire: CastCodec(torch.bfloat16),
        WireFormat.FP16: lambda wire: CastCodec(torch.float16),
        WireFormat.INT8: lambda wire: Int8Codec(),
        WireFormat.TOPK: lambda wire: TopKCodec(wire.ratio),
    }
)


def codec_of(wire: Wire) -> Codec:
    """A new codec for ``wire``, for one thread."""
    return CODECS[wire.format](wire)
