"""The payloads that a worker exchanges with one shard: encodes gradients, and decodes received parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ps_protocol.cluster.answers import StepAnswer
from ps_protocol.model.layout import Layout, Range
from ps_protocol.wire.codecs import ErrorFeedback, PayloadCodec, PayloadRun, payload_runs
from ps_protocol.wire.formats import Wire
from ps_protocol.wire.frames import pieces_of
from ps_worker.model.optimizer_state import StateEntry, tensor_bytes

_RESIDUAL = "residual"


class Encoder:
    """Used by one shard's stream. A push is encoded once: a repetition sends the same bytes."""

    def __init__(self, layout: Layout, wire: Wire) -> None:
        self._layout = layout
        self._feedback = ErrorFeedback(PayloadCodec(wire), layout)
        self._sequence = 0
        self._runs: Sequence[PayloadRun] = ()
        self._buffer = memoryview(bytearray())
        self._payload = self._buffer

    def encode(self, sequence: int, region: torch.Tensor, runs: Sequence[PayloadRun]) -> memoryview:
        """The payload of push ``sequence`` with ``runs`` of the gradients in ``region``; valid until the next push."""
        if sequence != self._sequence:
            if runs is not self._runs:
                size = self._feedback.payload.encoded_bytes(runs)
                if size > len(self._buffer):
                    self._buffer = memoryview(bytearray(size))
                self._runs, self._payload = runs, self._buffer[:size]
            self._feedback.encode(region, runs, self._payload)
            self._sequence = sequence
        return self._payload

    def take_back(self, sequence: int, region: torch.Tensor) -> None:
        """If push ``sequence`` was encoded, set the gradients in ``region`` to its decoded payload."""
        if sequence == self._sequence:
            self._feedback.payload.decode(self._payload, self._runs, region)
            self._sequence = 0

    def residuals(self) -> list[StateEntry]:
        """The residuals, not sent yet, by slice."""
        slices = range(self._layout.parameter_slices)
        found = [(index, self._feedback.residual(index)) for index in slices]
        return [StateEntry(index, _RESIDUAL, values) for index, values in found if values is not None]

    def load_residuals(self, entries: Sequence[StateEntry]) -> None:
        """Replace the residuals by ``entries``; slices without an entry have none."""
        self._feedback.clear()
        for entry in entries:
            residual = self._feedback.residual(entry.slice_index)
            if residual is not None:
                residual.copy_(entry.tensor)


class ReceiveBuffer:
    """Memory in the layout of the shard's region, for parameters that must be decoded or published later.

    Filled by the thread that receives, then emptied by the training thread. With a wire format that keeps errors it
    holds the parameters that the shard assumes this worker to have. Differences are added to these, not to the model's
    own parameters, which the user may change.
    """

    def __init__(self, layout: Layout, wire: Wire) -> None:
        self._layout = layout
        self._codec = PayloadCodec(wire)
        self._region = torch.zeros(layout.region_bytes, dtype=torch.uint8)
        self._bytes = tensor_bytes(self._region)
        self._encoded = memoryview(bytearray())
        #: Of the last payload: absent slices and whether buffers; ranges of the region, and the same as runs.
        self._contents: tuple[tuple[tuple[int, ...], bool] | None, list[Range], Sequence[PayloadRun]] = None, [], ()
        #: The result that has arrived and was not taken yet; several are merged into one.
        self.arrived: StepAnswer | None = None

    def place(self, result: StepAnswer) -> list[memoryview]:
        """The memory for the payload of ``result``."""
        if not result.encoded:
            return pieces_of(self._bytes, self._contents_of(result)[0])
        size = self._codec.encoded_bytes(self._contents_of(result)[1])
        if size > len(self._encoded):
            self._encoded = memoryview(bytearray(size))
        return [self._encoded[:size]]

    def complete(self, result: StepAnswer) -> None:
        """Decode the payload of ``result``, which has arrived. Raises InvalidRequest if that fails."""
        if not result.payload_bytes:
            return
        if result.encoded:
            decode = self._codec.accumulate if self._codec.keeps_error else self._codec.decode
            decode(self._encoded[: result.payload_bytes], self._contents_of(result)[1], self._region)
        self.arrived = result if self.arrived is None else _both(self.arrived, result)

    def values(self, ranges: Sequence[Range]) -> list[torch.Tensor]:
        """The bytes of the region at ``ranges``, decoded."""
        return [self._region[begin:end] for begin, end in ranges]

    def take(self, targets: Sequence[torch.Tensor]) -> None:
        """Copy the arrived bytes, concatenated, to ``targets``, flat tensors of bytes."""
        if self.arrived is not None:
            copy_end_to_end(targets, [self._region[begin:end] for begin, end in self._contents_of(self.arrived)[0]])
            self.arrived = None

    def _contents_of(self, result: StepAnswer) -> tuple[list[Range], Sequence[PayloadRun]]:
        # Unchanged in most steps.
        absent, buffers = result.absent, result.with_buffers
        if self._contents[0] != (absent, buffers):
            ranges = self._layout.ranges(absent, buffers=buffers)
            self._contents = (absent, buffers), ranges, payload_runs(self._layout, absent, buffers=buffers)
        return self._contents[1:]


def _both(one: StepAnswer, other: StepAnswer) -> StepAnswer:
    """Both results as one. A slice is absent if both omit it: the later one omits unchanged slices."""
    absent = set(one.absent).intersection(other.absent)
    return replace(other, absent=tuple(sorted(absent)), with_buffers=one.with_buffers or other.with_buffers)


def copy_end_to_end(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy the concatenated bytes of ``sources`` to ``targets``: flat tensors of bytes, with the same total size."""
    waiting = [target for target in targets if len(target)]
    for source in sources:
        while len(source):
            size = min(len(waiting[0]), len(source))
            waiting[0][:size].copy_(source[:size])
            source, waiting[0] = source[size:], waiting[0][size:]
            if not len(waiting[0]):
                waiting.pop(0)
