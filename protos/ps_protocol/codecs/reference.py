"""Parameters as differences to what the receiver has, so that both ends hold the same bits.

What an encoding leaves out stays in the difference and is part of the next one: error feedback without a residual.
Gruntkowska et al., "EF21-P and Friends" (2022); before it, between neighbours, Koloskova et al., "Decentralized
Stochastic Optimization and Gossip Algorithms with Compressed Communication" (2019).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ps_protocol.codecs.codec import Buffer, Bytes, Elements, as_bytes, silent
from ps_protocol.codecs.payload import Part, PayloadCodec, saturate
from ps_protocol.codecs.runs import Run
from ps_protocol.errors import InternalError
from ps_protocol.layout import Layout


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

    def encode(self, region: Buffer, runs: Sequence[Run], out: Buffer) -> None:
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

    def _encode_run(self, part: Part, parameters: Elements, payload: Bytes) -> None:
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
