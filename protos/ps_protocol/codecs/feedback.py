"""What encodings of gradients left out, kept on the worker and sent with the next ones.

Seide et al., "1-Bit Stochastic Gradient Descent" (2014); that it converges as SGD does: Karimireddy et al.,
"Error Feedback Fixes SignSGD and other Gradient Compression Schemes" (2019).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ps_protocol.codecs.codec import Buffer, Bytes, Elements, as_bytes, silent
from ps_protocol.codecs.payload import Part, PayloadCodec, saturate
from ps_protocol.codecs.runs import Run
from ps_protocol.layout import Layout

_CODED = (torch.float32, torch.float64)


class ErrorFeedback:
    """A PayloadCodec's ``encode`` with memory: payload = Q(e + g), then e = e + g − payload.

    Called by the worker's sender for one shard, from one thread at a time; ``residual`` while no encode runs. The sum
    of all decoded payloads and of the residual is the sum of all gradients, up to float rounding. Slices that a
    payload leaves out keep their residual. A payload that is sent again must be the same bytes, not encoded again.

    Where gradient or residual is not finite, so is what is sent, and the residual becomes zero. With a format that
    does not keep errors (``Codec.keeps_error``) there are no residuals and ``encode`` is the codec's.
    """

    def __init__(self, payload: PayloadCodec, layout: Layout) -> None:
        self.payload = payload
        self.layout = layout
        # Zeroed by the kernel: pages of arenas that are not coded are never touched and take no memory.
        self._region = np.zeros(layout.parameter_bytes if payload.keeps_error else 0, np.uint8)

    def encode(self, region: Buffer, runs: Sequence[Run], out: Buffer) -> None:
        """Write the gradients ``region`` and the residuals to ``out``. Raises as ``PayloadCodec.encode`` does."""
        if not self.payload.keeps_error:
            self.payload.encode(region, runs, out)
            return
        gradients, payload = as_bytes(region), self.payload.sized(out, runs)
        for part in self.payload.parts(runs):
            if part.run.dtype is None:
                part.codec.encode(part.of(gradients), payload[part.place])
            else:
                self._encode_run(part, part.of(gradients), payload[part.place])

    def residual(self, index: int) -> Tensor | None:
        """The residual of slice ``index`` of the layout, in its shape and dtype, to be read and written in place.

        None where the slice has none: it travels as it is, or the format keeps no errors.
        """
        span = self.layout.slices[index]
        dtype = getattr(torch, span.variable.dtype.value)
        if not self.payload.keeps_error or index >= self.layout.parameter_slices or dtype not in _CODED:
            return None
        return torch.from_numpy(self._region[span.begin : span.end]).view(dtype).view(span.shape)

    def clear(self) -> None:
        """Forget all residuals."""
        self._region.fill(0)

    def _encode_run(self, part: Part, gradient: Elements, payload: Bytes) -> None:
        residual = part.of(self._region)
        for elements, place in part.codec.pieces(part.elements, part.dtype):
            error, added = residual[elements], gradient[elements]
            with silent():
                np.add(error, added, out=error)
            finite = saturate(error, added)
            part.codec.encode_piece(error, payload[place])
            part.codec.accumulate_piece(payload[place], error, -1)
            if not finite:
                np.nan_to_num(error, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
