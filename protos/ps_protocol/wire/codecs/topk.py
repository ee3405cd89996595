"""The largest elements with their places, the others left out.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent" (2017).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import InvalidRequest
from ps_protocol.wire.codecs.codec import Bytes, Codec, DTypeOf, Elements, silent
from ps_protocol.wire.codecs.largest import largest

_POSITION = np.dtype(np.int32)


class TopKCodec(Codec):
    """k = max(1, ceil(n × ratio)) positions, int32, ascending, then the k values, exact. Called as every Codec is.

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
