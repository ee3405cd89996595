"""Elements as int8 with a scale for each block of 256: a little over 1 byte each.

Block-wise absmax quantisation of Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022), here with
evenly spaced levels. Dettmers, "8-Bit Approximations for Parallelism in Deep Learning" (2016), sends gradients so.
"""

from __future__ import annotations

import numpy as np

from ps_protocol.wire.codecs.codec import Bytes, Codec, DTypeOf, Elements, silent

BLOCK_ELEMENTS = 256
LEVELS = 127


class Int8Codec(Codec):
    """Each block: its scale, absmax / 127, in the type of the elements, then one int8 per element, value / scale
    rounded to nearest even. The last block may be shorter. Called as every Codec is.

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
