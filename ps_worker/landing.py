"""Where a shard's parameters arrive when they are not to be the model's at once, or do not come as they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ps_protocol.codecs import PayloadCodec, payload_runs
from ps_protocol.frames import pieces_of
from ps_protocol.layout import Layout, Range
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire import Wire
from ps_worker.memory import copy_end_to_end
from ps_worker.state import tensor_bytes


class Landing:
    """Memory laid out as the shard's region. Filled by whoever receives, then emptied by the training thread.

    With a wire format that keeps errors, it holds what the shard takes this worker to have, so that differences can be
    added to it, whatever becomes of the model's own parameters meanwhile.
    """

    def __init__(self, layout: Layout, wire: Wire) -> None:
        self._layout = layout
        self._codec = PayloadCodec(wire)
        self._region = torch.zeros(layout.region_bytes, dtype=torch.uint8)
        self._bytes = tensor_bytes(self._region)
        self._encoded = memoryview(bytearray())
        #: What is here and has not been taken: a result, or one that stands for several.
        self.arrived: pb.StepResult | None = None

    def place(self, result: pb.StepResult) -> list[memoryview]:
        """Where the payload of ``result`` goes."""
        if not result.encoded:
            return pieces_of(self._bytes, self._ranges_of(result))
        size = self._codec.encoded_bytes(payload_runs(self._layout, result.absent, buffers=result.with_buffers))
        if size > len(self._encoded):
            self._encoded = memoryview(bytearray(size))
        return [self._encoded[:size]]

    def settle(self, result: pb.StepResult) -> None:
        """The payload of ``result`` is in its place. Raises InvalidRequest when it cannot be decoded."""
        if not result.payload_bytes:
            return
        if result.encoded:
            runs = payload_runs(self._layout, result.absent, buffers=result.with_buffers)
            decode = self._codec.accumulate if self._codec.keeps_error else self._codec.decode
            decode(self._encoded[: result.payload_bytes], runs, self._region)
        self.arrived = result if self.arrived is None else _both(self.arrived, result)

    def take(self, targets: Sequence[torch.Tensor]) -> None:
        """Copy what has arrived, end to end, to ``targets``, flat tensors of bytes."""
        if self.arrived is not None:
            copy_end_to_end(targets, [self._region[begin:end] for begin, end in self._ranges_of(self.arrived)])
            self.arrived = None

    def _ranges_of(self, result: pb.StepResult) -> list[Range]:
        return self._layout.ranges(result.absent, buffers=result.with_buffers)


def _both(one: pb.StepResult, other: pb.StepResult) -> pb.StepResult:
    """What two results have brought together; the later leaves out what has not changed since the earlier."""
    absent = set(one.absent).intersection(other.absent)
    return pb.StepResult(absent=sorted(absent), with_buffers=one.with_buffers or other.with_buffers)
