"""One flat block of memory that the network reads and writes, and its mirrors on the training devices."""

from __future__ import annotations

import errno
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from ps_protocol.model.layout import Range, aligned, merge
from ps_protocol.model.spec import ALIGNMENT_BYTES, DType
from ps_protocol.wire.shared_memory import PrivateMapping, SharedMemory
from ps_worker.model.optimizer_state import tensor_bytes

HOST = torch.device("cpu")

#: The device that uses each byte, as ordered ranges; they may leave gaps, but do not overlap.
Homes = Mapping[torch.device, Sequence[Range]]


class FlatMemory:
    """Used by the training thread; threads that send only read ``bytes``.

    Bytes of the CPU are used in place. Bytes of another device have a packed mirror there. The host side is pinned
    where the device allows it, and one copy each way makes both equal when the owner asks for it. All pages are touched
    here, once.
    """

    def __init__(
        self,
        size_bytes: int,
        homes: Homes,
        segment: SharedMemory | None = None,
        own: torch.Tensor | None = None,
    ) -> None:
        """``segment``: shared memory to use and keep; None: memory of its own.

        ``own``: the ``own`` memory of another block, reused as it is if large enough; else zeros.
        """
        #: Private host memory that another block may reuse; None: not reusable.
        self.own: torch.Tensor | None = None
        pinned = any(device.type == "cuda" for device in homes)
        #: The shared memory that it is in; None: it is in none.
        self.segment = segment
        if segment is not None:
            self.host = torch.frombuffer(segment.bytes, dtype=torch.uint8, count=size_bytes)
            if pinned:
                _pin(self.host, self)
        elif own is not None and len(own) >= size_bytes and not pinned:
            self.own, self.host = own, own[:size_bytes]
        else:
            self.host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned).zero_()
            self.own = None if pinned else self.host
        self.bytes = tensor_bytes(self.host)
        self._homes = {device: merge(ranges) for device, ranges in homes.items()}
        self._mirrors = {d: Mirror(self.host, ranges, d) for d, ranges in self._homes.items() if d != HOST}

    def view(self, device: torch.device, begin: int, dtype: DType, shape: Sequence[int]) -> torch.Tensor:
        """A tensor of ``shape`` from byte ``begin`` on, where ``device`` uses it, in a storage of its own.

        Code that saves or copies storages therefore saves this tensor alone, and no two tensors appear to share one.
        """
        end = begin + math.prod(shape) * dtype.itemsize
        data = self._mirrors[device].part(begin, end) if device in self._mirrors else self.host[begin:end]
        return alone(data).view(getattr(torch, dtype.value)).view(shape)

    def on_device(self, device: torch.device, begins: Iterable[int]) -> tuple[torch.Tensor, list[int]]:
        """The whole mirror of ``device`` as flat words of 8 bytes, and the positions in it of host bytes ``begins``."""
        mirror = self._mirrors[device]
        return mirror.words, [mirror.position(begin) for begin in begins]

    def parts(self, span: Range) -> Iterator[torch.Tensor]:
        """The bytes of ``span`` that a device uses, as one tensor for each run on one device."""
        for device, ranges in self._homes.items():
            for begin, end in overlap(ranges, span):
                yield self._mirrors[device].part(begin, end) if device in self._mirrors else self.host[begin:end]

    def pieces(self, ranges: Sequence[Range]) -> list[memoryview]:
        """Host memory at ``ranges``, to be sent or received into."""
        if self._mirrors:
            self.wait()
        host, pieces = self.bytes, []
        for begin, end in ranges:
            pieces.append(host[begin:end])
        return pieces

    def wait(self) -> None:
        """Until no copy from or to a device is under way."""
        for mirror in self._mirrors.values():
            mirror.wait()

    def to_host(self, span: Range) -> None:
        """Bring the bytes of ``span`` from the devices; done on return."""
        self.bring(span)()

    def bring(self, span: Range) -> Callable[[], None]:
        """Queue the copies of the bytes of ``span`` from the devices; returns a function that waits for them."""
        for mirror in self._mirrors.values():
            mirror.to_host(span)
        return self.wait

    def take_over(self, old: FlatMemory) -> None:
        """Copy all bytes of ``old``, which has the same homes, on the host and on each device."""
        for device, mirror in self._mirrors.items():
            mirror.take_over(old._mirrors[device])
        self.host.copy_(old.host)

    @property
    def is_mappable(self) -> bool:
        """Whether all its bytes are in a segment."""
        return self.segment is not None or not len(self.host)

    def private(self) -> PrivateMapping:
        """A mapping of its bytes, which are in a segment, that may be written without changing them. Raises OSError."""
        if self.segment is None:
            raise OSError(errno.ENOTSUP, "this memory is in no segment")
        return PrivateMapping(self.segment, len(self.host))

    def trim(self) -> None:
        """Give back what its segment holds behind its bytes."""
        if self.segment is not None:
            self.segment.trim(len(self.host))

    def to_devices(self, span: Range) -> None:
        """Bring the bytes of ``span`` to the devices; what is queued there afterwards sees them."""
        for mirror in self._mirrors.values():
            mirror.to_device(span)


class Mirror:
    """A packed copy of some ``ranges`` of host memory on one device. Copies go through a stream of its own."""

    def __init__(self, host: torch.Tensor, ranges: Sequence[Range], device: torch.device) -> None:
        self._host = host
        self._ranges = ranges
        self._offsets: list[int] = []
        total = 0
        for begin, end in ranges:
            # Keep the host's offset from the alignment: wider elements may follow.
            first = total + begin % ALIGNMENT_BYTES
            self._offsets.append(first - begin)
            total = aligned(first + end - begin)
        self._values = torch.zeros(total, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._device = device

    def part(self, begin: int, end: int) -> torch.Tensor:
        """Host bytes [begin, end), all in one of the ranges, as they are on the device."""
        for (first, last), offset in zip(self._ranges, self._offsets, strict=True):
            if first <= begin and end <= last:
                return self._values[begin + offset : end + offset]
        return self._values[:0]  # nothing, at the end of the arenas: an empty variable

    @property
    def words(self) -> torch.Tensor:
        """All of it, int64."""
        return self._values.view(torch.int64)

    def position(self, begin: int) -> int:
        """Where host byte ``begin``, of one of the ranges, is on the device."""
        spans = zip(self._ranges, self._offsets, strict=True)
        return next(begin + offset for (first, last), offset in spans if first <= begin < last)

    def to_host(self, span: Range) -> None:
        """Queue the copy of ``span``."""
        self._copy([(self._host[b:e], self.part(b, e)) for b, e in overlap(self._ranges, span)])

    def to_device(self, span: Range) -> None:
        """Queue the copy of ``span``; the device's current stream goes on after it."""
        self._copy([(self.part(b, e), self._host[b:e]) for b, e in overlap(self._ranges, span)])
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def take_over(self, old: Mirror) -> None:
        """Copy all bytes of ``old``; done on return."""
        old.wait()
        self._values.copy_(old._values)

    def wait(self) -> None:
        """Until no copy is under way."""
        if self._stream is not None:
            self._stream.synchronize()

    def _copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)


def alone(data: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor in a storage of its own, which keeps it alive, on any device."""
    return torch.from_dlpack(torch.utils.dlpack.to_dlpack(data))  # type: ignore[attr-defined]


def overlap(ranges: Sequence[Range], span: Range) -> Iterator[Range]:
    """The parts of ``ranges`` that are in ``span``."""
    for begin, end in ranges:
        first, last = max(begin, span[0]), min(end, span[1])
        if first < last:
            yield first, last


def _pin(host: torch.Tensor, owner: object) -> None:
    """Pin memory that torch did not allocate, for as long as ``owner`` lives. Where that fails, copies are slower.

    It must not be unmapped while it is pinned: CUDA would take the next mapping at this address for it.
    """
    address, cudart = host.data_ptr(), torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(cudart.cudaHostRegister(address, host.numel(), 0)) == 0:
        weakref.finalize(owner, cudart.cudaHostUnregister, address).atexit = False
