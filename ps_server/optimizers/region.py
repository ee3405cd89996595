"""Owns the bytes of one region: one allocation, seen as bytes by the wire and as tensors by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ps_protocol.layout import Layout
from ps_protocol.model import DType


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype that ``dtype`` is named after."""
    found = getattr(torch, dtype.value)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch.{dtype.value} is not a dtype")
    return found


class Region:
    """The bytes of one layout, for values or for gradients. Starts zeroed, its pages touched, 64-byte aligned.

    Used by whoever holds it, one at a time: it has no lock. All views share its memory and keep it alive.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        #: All bytes, uint8. Written here, so that their pages are faulted in now and not during the first step.
        self.data = torch.zeros(layout.region_bytes, dtype=torch.uint8)
        #: Writable bytes, for frames.Scatter and frames.gather.
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
