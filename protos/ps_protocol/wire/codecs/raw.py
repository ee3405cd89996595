"""The elements as they are in memory."""

from __future__ import annotations

import numpy as np

from ps_protocol.wire.codecs.codec import Bytes, Codec, DTypeOf, Elements, silent


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
