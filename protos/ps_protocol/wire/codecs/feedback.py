"""What encodings left out is kept by the sender and sent with the next ones.

ErrorFeedback, the worker's side, keeps it for gradients:
Seide et al., "1-Bit Stochastic Gradient Descent" (2014); that it converges as SGD does: Karimireddy et al.,
"Error Feedback Fixes SignSGD and other Gradient Compression Schemes" (2019).

Reference, the shard's side, sends parameters as differences to what the receiver has, so that both ends hold the same
bits. What an encoding leaves out stays in the difference and is part of the next one: error feedback without residual.
Gruntkowska et al., "EF21-P and Friends" (2022); before it, between neighbours, Koloskova et al., "Decentralized
Stochastic Optimization and Gossip Algorithms with Compressed Communication" (2019).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ps_protocol.errors import InternalError
from ps_protocol.model.layout import Layout
from ps_protocol.wire.codecs.codec import Buffer, Bytes, Elements, as_bytes, silent
from ps_protocol.wire.codecs.payload import EncodedRun, PayloadCodec, PayloadRun, saturate

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

    def encode(self, region: Buffer, runs: Sequence[PayloadRun], out: Buffer) -> None:
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

        None where the slice has none: it is sent as it is, or the format keeps no errors.
        """
        span = self.layout.slices[index]
        dtype = getattr(torch, span.variable.dtype.value)
        if not self.payload.keeps_error or index >= self.layout.parameter_slices or dtype not in _CODED:
            return None
        return torch.from_numpy(self._region[span.begin : span.end]).view(dtype).view(span.shape)

    def clear(self) -> None:
        """Forget all residuals."""
        self._region.fill(0)

    def _encode_run(self, part: EncodedRun, gradient: Elements, payload: Bytes) -> None:
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


class Reference:
    """M, the parameters one receiver has: payload = Q(P − M), then M = M + payload.

    Called by the shard for one worker's stream, from one thread at a time. It costs the memory of the parameters, per
    worker. The receiver calls ``PayloadCodec.accumulate`` on the same payloads, all of them and in order, from the
    parameters that ``reset`` was called with; then its parameters are bitwise M. Slices that a payload leaves out
    stay as they are on both sides. Runs that are not coded are sent whole.

    With a format that does not keep errors the payload is Q(P), to be read with ``decode``; there is no M.
    """

    def __init__(self, payload: PayloadCodec, layout: Layout) -> None:
        self.payload = payload
        self._parameter_bytes = layout.parameter_bytes if payload.keeps_error else 0
        self._held = np.empty(self._parameter_bytes, np.uint8)
        #: The next payload must hold the parameters raw, all of them, and go with ``reset``: there was none yet, or a
        #: difference was not finite and differences to it never will be.
        self.needs_raw = payload.keeps_error

    def reset(self, region: Buffer) -> None:
        """Set M to the parameters in ``region``, which the receiver gets raw and whole."""
        np.copyto(self._held, as_bytes(region)[: self._parameter_bytes])
        self.needs_raw = False

    def encode(self, region: Buffer, runs: Sequence[PayloadRun], out: Buffer) -> None:
        """Write the step from M to the parameters in ``region`` to ``out``, of ``encoded_bytes``.

        Raises InvalidRequest for another length, InternalError when ``needs_raw``.
        """
        if self.needs_raw:
            raise InternalError("a difference of parameters was asked for before they were sent whole")
        if not self.payload.keeps_error:
            self.payload.encode(region, runs, out)
            return
        parameters, payload = as_bytes(region), self.payload.sized(out, runs)
        for part in self.payload.parts(runs):
            if part.run.dtype is None:
                part.codec.encode(part.of(parameters), payload[part.place])
            else:
                self._encode_run(part, part.of(parameters), payload[part.place])

    @property
    def held(self) -> Bytes:
        """The bytes of M, to be read; only coded runs are kept up to date."""
        return self._held

    def _encode_run(self, part: EncodedRun, parameters: Elements, payload: Bytes) -> None:
        held = part.of(self._held)
        for elements, place in part.codec.pieces(part.elements, part.dtype):
            wanted, has = parameters[elements], held[elements]
            step = part.codec.scratch(len(has), part.dtype, "difference")
            with silent():
                np.subtract(wanted, has, out=step)
            if not saturate(step, wanted, has):
                self.needs_raw = True
            part.codec.encode_piece(step, payload[place])
            part.codec.accumulate_piece(payload[place], has, 1)
