"""Owns the bytes of one region: one allocation, seen as bytes by the wire and as tensors by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ps_protocol.layout import Layout
from ps_protocol.model import DType
from ps_protocol.segments import Segment


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype that ``dtype`` is named after."""
    found = getattr(torch, dtype.value)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch.{dtype.value} is not a dtype")
    return found


class Region:
    """The bytes of one layout, for values or for gradients. Starts zeroed, its pages touched, 64-byte aligned.

    It lies in memory that can be shown to other processes; where the system has none to give, in memory of its own.
    Used by whoever holds it, one at a time: it has no lock. All views share its memory and keep it alive.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        #: None where the memory cannot be shared.
        self.segment = _segment(layout.region_bytes)
        #: All bytes, uint8. Touched here, so that their pages are faulted in now and not during the first step.
        self.data = (
            torch.frombuffer(self.segment.bytes, dtype=torch.uint8)
            if self.segment
            else torch.zeros(layout.region_bytes, dtype=torch.uint8)
        )
        #: Writable bytes, for the wire.
        self.bytes = memoryview(self.data.numpy().data)

    def tensor(self, begin: int, end: int, dtype: DType, shape: tuple[int, ...] = (-1,)) -> Tensor:
        """Bytes [begin, end) as a tensor; ``begin`` is a multiple of the dtype's size."""
        view = self.data[begin:end].view(torch_dtype(dtype))
        return view if shape == (-1,) else view.view(shape)

    def arena(self, number: int) -> Tensor:
        """One arena, flat."""
        span = self.layout.arenas[number]
        return self.tensor(span.begin, span.end, span.key.dtype)

    def slice(self, index: int) -> Tensor:
        """One slice, in its shape."""
        span = self.layout.slices[index]
        return self.tensor(span.begin, span.end, span.variable.dtype, span.shape)


def _segment(size_bytes: int) -> Segment | None:
    """Shared memory of this size, None when there is none to be had."""
    try:
        return Segment.create(size_bytes) if size_bytes else None
    except (OSError, AttributeError):
        return None
