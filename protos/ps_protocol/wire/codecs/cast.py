"""Elements rounded to 16-bit floating point: 2 bytes each."""

from __future__ import annotations

import numpy as np
import torch

from ps_protocol.wire.codecs.codec import Bytes, Codec, DTypeOf, Elements, silent

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
