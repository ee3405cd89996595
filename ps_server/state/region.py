"""The bytes of one region, seen as bytes by the wire and as tensors by torch; and the pool that reuses regions."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from ps_protocol.model.layout import Layout, Range
from ps_protocol.model.spec import DType
from ps_protocol.wire.shared_memory import SharedMemory

_KEPT_VIEWS = 256
"""Flat views that a region keeps for the next step."""

#: Bytes [begin, end) of a region, and their type.
Span = tuple[int, int, DType]


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

    def __init__(self, layout: Layout, segment: SharedMemory | None = None) -> None:
        """``segment``: memory to use as it is; None: new memory."""
        self.layout = layout
        #: None where the memory cannot be shared. May be larger than the region.
        self.segment = segment or _segment(layout)
        #: All bytes, uint8. Touched here, so that their pages are faulted in now and not during the first step.
        self.data = (
            torch.frombuffer(self.segment.bytes, dtype=torch.uint8, count=layout.region_bytes)
            if self.segment
            else torch.zeros(layout.region_bytes, dtype=torch.uint8)
        )
        #: Writable bytes, for the wire.
        self.bytes = memoryview(self.data.numpy().data)
        self._flat: dict[Span, Tensor] = {}
        #: What ``flats`` has returned last, and for which argument.
        self._flats: tuple[Sequence[Sequence[Span]], list[list[Tensor]]] = (), []

    def relaid(self, layout: Layout) -> Region | None:
        """The same memory, its bytes as they are, in another layout; None: it is too small, or must be given back.

        This region is not to be used any more. Raises OSError where the system has no room.
        """
        segment = self.segment
        if segment is None or not 0 < layout.region_bytes <= len(segment.bytes):
            return None
        segment.touch(layout.region_bytes)
        return Region(layout, segment)

    def touch(self, size_bytes: int) -> None:
        """Allocate memory for a layout of this size, where ``relaid`` can use it. Raises OSError without room."""
        if self.segment is not None and size_bytes <= len(self.segment.bytes):
            self.segment.touch(size_bytes)

    @property
    def unused_bytes(self) -> int:
        """Bytes of its memory beside those of its layout."""
        return max(0, self.segment.touched_bytes - len(self.data)) if self.segment is not None else 0

    def trim(self) -> None:
        """Give back memory that the layout does not need, where no other process has been given it to read."""
        if self.segment is not None:
            self.segment.trim(len(self.data))

    def tensor(self, begin: int, end: int, dtype: DType, shape: tuple[int, ...] = (-1,)) -> Tensor:
        """Bytes [begin, end) as a tensor; ``begin`` is a multiple of the dtype's size."""
        view = self.data[begin:end].view(torch_dtype(dtype))
        return view if shape == (-1,) else view.view(shape)

    def flat(self, begin: int, end: int, dtype: DType) -> Tensor:
        """As ``tensor``, flat; the same object as before, to be read and written but not pointed elsewhere."""
        key = begin, end, dtype
        if (found := self._flat.get(key)) is None:
            if len(self._flat) >= _KEPT_VIEWS:
                self._flat.clear()
            found = self._flat[key] = self.tensor(begin, end, dtype)
        return found

    def flats(self, groups: Sequence[Sequence[Span]]) -> list[list[Tensor]]:
        """``flat`` of each span of each group; quick where ``groups`` is the object of the last call."""
        known, found = self._flats
        if known is not groups:
            found = [[self.flat(*span) for span in spans] for spans in groups]
            self._flats = groups, found
        return found

    def pieces(self, ranges: Iterable[Range]) -> list[memoryview]:
        """The ``ranges`` as views."""
        data = self.bytes
        found = []
        for begin, end in ranges:
            found.append(data[begin:end])
        return found

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
        #: Every region that was made here and is still there.
        self._made: weakref.WeakSet[Region] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._streams = 0
        #: Streams that need one region together.
        self._sharing = 0
        #: Streams that are to be opened again after a move, here or with the successor; and whether some of them share.
        self._expected = 0
        self._expects_sharing = False
        #: Spare regions that are kept; follows from these.
        self._wanted = 0
        #: Takes what comes back; None: this pool does.
        self._successor: RegionPool | None = None
        #: Regions in use, taken and not given back.
        self.in_use = 0

    @property
    def spare(self) -> int:
        """Regions that wait for the next taker."""
        return len(self._spare)

    def take(self) -> Region:
        """A region with unspecified content."""
        with self._lock:
            self.in_use += 1
            if self._spare:
                return self._spare.pop()
        region = Region(self._layout)
        with self._lock:
            self._made.add(region)
        return region

    def give(self, region: Region) -> None:
        """Hand a region back; its views must not be used any more."""
        with self._lock:
            self.in_use -= 1
            if self._successor is None:
                if len(self._spare) < self._wanted:
                    self._spare.append(region)
                return
            successor = self._successor
        successor.adopt(region)

    def adopt(self, region: Region) -> None:
        """Take a region of the pool before this one, in another layout, where there is memory for that."""
        with self._lock, suppress(OSError):
            if (relaid := region.relaid(self._layout)) is not None:
                relaid.trim()
                self._made.add(relaid)
                if len(self._spare) < self._wanted:
                    self._spare.append(relaid)

    def hold(self) -> None:
        """Keep the memory of streams that end because slices move, until ``continue_in``."""
        with self._lock:
            self._expected, self._expects_sharing = self._streams, self._sharing > 0
            self._count_wanted()

    def continue_in(self, successor: RegionPool) -> None:
        """After ``hold``: streams go on with ``successor``, which gets what is here and what comes back."""
        with self._lock:
            self._successor, spare, self._spare = successor, self._spare, []
            successor._expected, successor._expects_sharing = self._expected, self._expects_sharing
            successor._count_wanted()
        for region in spare:
            successor.adopt(region)

    def touch(self, size_bytes: int) -> None:
        """Call ``Region.touch`` for all regions of the pool. Raises OSError where there is no room."""
        with self._lock:
            regions = list(self._made)
        for region in regions:
            region.touch(size_bytes)

    def _count_wanted(self) -> None:
        self._wanted = self._streams + self._expected + (self._sharing > 0 or self._expects_sharing)

    @contextmanager
    def reserved(self, *, sharing: bool = False) -> Iterator[None]:
        """Keep one spare region for as long as a stream is open; ``sharing``: one for all such streams together.

        Streams whose gradients are in memory of their own share: what is made of them, a mean or a copy for the log, is
        made one at a time.
        """
        with self._lock:
            self._streams += not sharing
            self._sharing += sharing
            if sharing:
                self._expects_sharing = False
            else:
                self._expected = max(0, self._expected - 1)
            self._count_wanted()
        try:
            yield
        finally:
            with self._lock:
                self._streams -= not sharing
                self._sharing -= sharing
                self._count_wanted()
                del self._spare[self._wanted :]


def _segment(layout: Layout) -> SharedMemory | None:
    """Shared memory of this size, with address space for slices that move here; None where the system gives none."""
    if not layout.region_bytes:
        return None
    for reserved_bytes in (layout.largest_bytes, 0):
        with suppress(OSError, AttributeError):
            return SharedMemory.create(layout.region_bytes, reserved_bytes=reserved_bytes)
    return None
