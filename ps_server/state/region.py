"""The bytes of one region, seen as bytes by the wire and as tensors by torch; and the pool that reuses regions."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ps_protocol.model.layout import Layout, Range
from ps_protocol.model.spec import DType
from ps_protocol.wire.shared_memory import SharedMemory


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype that ``dtype`` is named after."""
    found = getattr(torch, dtype.value)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch.{dtype.value} is not a dtype")
    return found


class Region:
    """The bytes of one layout, for values or for gradients. Starts zeroed, its pages touched, 64-byte aligned.

    Its memory can be shared with other processes where the system allows it, and is private otherwise.
    Used by its owner only: it has no lock. All views share its memory and keep it alive.
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

    def pieces(self, ranges: Iterable[Range]) -> list[memoryview]:
        """The ``ranges`` as views."""
        return [self.bytes[begin:end] for begin, end in ranges]

    def arena(self, number: int) -> Tensor:
        """One arena, flat."""
        span = self.layout.arenas[number]
        return self.tensor(span.begin, span.end, span.key.dtype)

    def slice(self, index: int) -> Tensor:
        """One slice, in its shape."""
        span = self.layout.slices[index]
        return self.tensor(span.begin, span.end, span.variable.dtype, span.shape)


class RegionPool:
    """Regions for gradients that come in and parameters that go out. Used from the event loop and from the executor.

    A worker's exchange needs one region at a time: first for its gradients, then for the parameters of its reply. So a
    shard's memory is its arenas, its optimizer state and one region per worker in the middle of an exchange. Spare
    regions are kept as long as streams are open that will need them.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._spare: list[Region] = []
        self._lock = threading.Lock()
        self._streams = 0
        #: Regions in use, taken and not given back.
        self.in_use = 0

    @property
    def spare(self) -> int:
        """Regions held for the next taker."""
        return len(self._spare)

    def take(self) -> Region:
        """A region with unspecified content."""
        with self._lock:
            self.in_use += 1
            if self._spare:
                return self._spare.pop()
        return Region(self._layout)

    def give(self, region: Region) -> None:
        """Hand a region back; its views must not be used any more."""
        with self._lock:
            self.in_use -= 1
            if len(self._spare) < self._streams:
                self._spare.append(region)

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Keep one spare region for as long as a stream is open."""
        with self._lock:
            self._streams += 1
        try:
            yield
        finally:
            with self._lock:
                self._streams -= 1
                del self._spare[self._streams :]


def _segment(size_bytes: int) -> SharedMemory | None:
    """Shared memory of this size, None where the system gives none."""
    try:
        return SharedMemory.create(size_bytes) if size_bytes else None
    except (OSError, AttributeError):
        return None
