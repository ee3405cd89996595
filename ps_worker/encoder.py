"""Writes the gradients for one shard in a wire format, and keeps what that leaves out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ps_protocol.codecs import ErrorFeedback, PayloadCodec, Run
from ps_protocol.layout import Layout
from ps_protocol.wire import Wire
from ps_worker.state import StateEntry

_RESIDUAL = "residual"


class Encoder:
    """Used by the lane of one shard. A push that is repeated is the same bytes: it is encoded once."""

    def __init__(self, layout: Layout, wire: Wire) -> None:
        self._layout = layout
        self._feedback = ErrorFeedback(PayloadCodec(wire), layout)
        self._sequence = 0
        self._buffer = memoryview(bytearray())
        self._payload = self._buffer

    def encode(self, sequence: int, region: torch.Tensor, runs: Sequence[Run]) -> memoryview:
        """The payload of push ``sequence`` with ``runs`` of the gradients in ``region``; valid until the next push."""
        if sequence != self._sequence:
            size = self._feedback.payload.encoded_bytes(runs)
            if size > len(self._buffer):
                self._buffer = memoryview(bytearray(size))
            self._payload = self._buffer[:size]
            self._feedback.encode(region, runs, self._payload)
            self._sequence = sequence
        return self._payload

    def take_back(self, region: torch.Tensor, runs: Sequence[Run]) -> None:
        """Make the gradients in ``region`` what the last payload, of ``runs``, brings; what it left out is kept."""
        self._feedback.payload.decode(self._payload, runs, region)
        self._sequence = 0

    def residuals(self) -> list[StateEntry]:
        """What has not been sent yet, by slice."""
        slices = range(self._layout.parameter_slices)
        found = [(index, self._feedback.residual(index)) for index in slices]
        return [StateEntry(index, _RESIDUAL, values) for index, values in found if values is not None]

    def load_residuals(self, entries: Sequence[StateEntry]) -> None:
        """Take over ``entries``; slices without one have nothing left to send."""
        self._feedback.clear()
        for entry in entries:
            residual = self._feedback.residual(entry.slice_index)
            if residual is not None:
                residual.copy_(entry.tensor)
