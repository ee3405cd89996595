"""One flat block of memory that the network reads and writes, and its twin on the training device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ps_protocol.frames import pieces_of
from ps_protocol.layout import Range
from ps_protocol.model import DType
from ps_worker.state import tensor_bytes


class FlatMemory:
    """Used by the training thread; gRPC's sending thread only reads ``bytes``.

    On the CPU ``host`` and ``device`` are the same memory. Elsewhere ``host`` is pinned where the device allows, and
    one copy each way makes them equal when the owner asks for it. All pages are touched here, once.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned).zero_()
        self.device = self.host if device.type == "cpu" else torch.zeros(size_bytes, dtype=torch.uint8, device=device)
        self.bytes = tensor_bytes(self.host)

    def view(self, begin: int, dtype: DType, shape: Sequence[int]) -> torch.Tensor:
        """A tensor of ``shape`` over the device memory from byte ``begin`` on."""
        elements = 1
        for length in shape:
            elements *= length
        typed = getattr(torch, dtype.value)
        flat = self.device[begin : begin + elements * dtype.itemsize]
        return flat.view(typed).view(*shape) if shape else flat.view(typed)[0]

    def pieces(self, ranges: Sequence[Range]) -> list[memoryview]:
        """Host memory at ``ranges``, to be sent or received into."""
        return pieces_of(self.bytes, ranges)

    def to_host(self, span: Range) -> None:
        """Copy the bytes of ``span`` from device to host; done on return."""
        self._copy(self.host, self.device, span)

    def to_device(self, span: Range) -> None:
        """Copy the bytes of ``span`` from host to device; done on return."""
        self._copy(self.device, self.host, span)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, span: Range) -> None:
        begin, end = span
        if self.host is not self.device and begin < end:
            target[begin:end].copy_(source[begin:end])
