"""What the workers of a host map of each other, the mean of their gradients, and parameters that the leader lends."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ps_protocol.model.layout import Layout, Range
from ps_protocol.model.spec import Buffers
from ps_protocol.wire.means import average_buffer_arenas, average_runs, parameter_runs, shares
from ps_protocol.wire.shared_memory import SharedMemory

_LEAST_BYTES = 64 << 10
"""Rows are lent in so much memory at least."""


def read_only(segment: SharedMemory, size_bytes: int) -> torch.Tensor:
    """The first bytes of ``segment``, uint8, which nothing may write: that would end the process.

    The tensor does not keep the segment mapped.
    """
    # torch warns of read-only buffers, so the buffer is passed by its address.
    address = np.frombuffer(segment.bytes, dtype=np.uint8).ctypes.data
    memory = (ctypes.c_uint8 * size_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


class MappedSegments:
    """The segments of another worker that are mapped here, by number: those of its last two messages."""

    def __init__(self) -> None:
        self._mapped: dict[int, SharedMemory] = {}
        self._last: frozenset[int] = frozenset()

    def add(self, number: int, fd: int, size_bytes: int) -> None:
        """Map ``fd``, which is taken over. Raises OSError, ValueError."""
        self._mapped[number] = SharedMemory.attach(fd, size_bytes, writable=False)

    def used(self, numbers: Iterable[int]) -> None:
        """A message names ``numbers``. Others are unmapped, unless the message before named them."""
        now = frozenset(numbers)
        kept = now | self._last
        self._mapped = {number: segment for number, segment in self._mapped.items() if number in kept}
        self._last = now

    def region(self, number: int, size_bytes: int) -> tuple[SharedMemory, torch.Tensor] | None:
        """The segment, which is to be kept while the tensor is used; None: it is not known, or too small."""
        segment = self._mapped.get(number)
        if segment is None or len(segment.bytes) < size_bytes:
            return None
        return segment, read_only(segment, size_bytes)


class LentSegments:
    """Numbers the segments that another worker is told of: those of the last two messages are known there."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[int, SharedMemory]] = {}
        self._last: frozenset[int] = frozenset()
        self._count = 0

    def number(self, segment: SharedMemory) -> tuple[int, bool]:
        """The number of ``segment``, and whether it is new."""
        known = self._numbers.get(id(segment))
        if known is not None:
            return known[0], False
        self._count += 1
        self._numbers[id(segment)] = self._count, segment
        return self._count, True

    def used(self, segments: Iterable[SharedMemory]) -> None:
        """A message names ``segments``: see ``MappedSegments.used``."""
        now = frozenset(map(id, segments))
        kept = now | self._last
        self._numbers = {key: known for key, known in self._numbers.items() if key in kept}
        self._last = now


@dataclass(frozen=True, slots=True)
class HostShare:
    """What one worker adds to the mean of its host, on one shard."""

    region: torch.Tensor
    absent: frozenset[int]
    weight: float
    with_buffers: bool


class HostMean:
    """The mean of the gradients of a host, in the layout of each shard's region. Used by the leader's exchanges."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._layouts = layouts
        self._regions: dict[int, torch.Tensor] = {}

    def region(self, shard: int) -> torch.Tensor:
        """All bytes of the shard's region, uint8."""
        if shard not in self._regions:
            self._regions[shard] = torch.zeros(self._layouts[shard].region_bytes, dtype=torch.uint8)
        return self._regions[shard]

    def pieces(self, shard: int, ranges: Sequence[Range]) -> list[memoryview]:
        """Bytes of the shard's region, to be sent."""
        data = memoryview(self.region(shard).numpy().data)
        return [data[begin:end] for begin, end in ranges]

    def take(self, shard: int, shared: Sequence[HostShare], buffers: Buffers) -> None:
        """Take the mean of ``shared``, in that order, by their weights; and their buffers, by the model's policy."""
        layout, into = self._layouts[shard], self.region(shard)
        weights = shares([each.weight for each in shared])
        average_runs(layout, into, [each.region for each in shared], [each.absent for each in shared], weights)
        values = [each.region for each in shared if each.with_buffers]
        begin = layout.parameter_bytes
        if len(values) > 1 and buffers is Buffers.AVERAGE:
            average_buffer_arenas(layout, into, values)
        elif values:
            into[begin:].copy_(values[0][begin:])

    def is_finite(self, shard: int, absent: frozenset[int]) -> bool:
        """Whether the sum of the mean is a finite number: a NaN or infinity in it is not overlooked."""
        return all(math.isfinite(run.sum(dtype=_wide(run)).item()) for run in self._present(shard, absent))

    def squared_norm(self, shard: int, absent: frozenset[int]) -> float:
        """The sum of the squares of the mean."""
        norms = (
            float(torch.linalg.vector_norm(run, dtype=_wide(run))) for run in self._present(shard, absent) if len(run)
        )
        return math.fsum(norm * norm for norm in norms)

    def _present(self, shard: int, absent: frozenset[int]) -> Iterable[torch.Tensor]:
        region = self.region(shard)
        for run in parameter_runs(self._layouts[shard], [absent]):
            if run.absent == (False,):
                yield region[run.begin : run.end].view(getattr(torch, run.dtype.value))


class LentRows:
    """The memory in which a follower lends the rows of its push. A larger one takes its place where it is too small."""

    def __init__(self) -> None:
        self._segment: SharedMemory | None = None

    def take(self, pieces: Sequence[memoryview]) -> SharedMemory | None:
        """The segment, with ``pieces`` one behind the other; None: there are none. Raises OSError where no room is."""
        size_bytes = sum(map(len, pieces))
        if not size_bytes:
            return None
        if self._segment is None or len(self._segment.bytes) < size_bytes:
            self._segment = SharedMemory.create(max(_LEAST_BYTES, 1 << (size_bytes - 1).bit_length()))
        begin = 0
        for piece in pieces:
            self._segment.bytes[begin : begin + len(piece)] = piece
            begin += len(piece)
        return self._segment


def _wide(run: torch.Tensor) -> torch.dtype:
    return torch.promote_types(run.dtype, torch.float32)


class LentParameters:
    """What the leader has received, for the others of its host: one segment for each shard."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        """Raises OSError where there is no room."""
        self.segments = [
            SharedMemory.create(layout.region_bytes) if layout.region_bytes else None for layout in layouts
        ]
        self._regions = [
            None if segment is None else torch.frombuffer(segment.bytes, dtype=torch.uint8) for segment in self.segments
        ]

    def region(self, shard: int) -> torch.Tensor:
        """All bytes of the shard's region, uint8."""
        region = self._regions[shard]
        return torch.empty(0, dtype=torch.uint8) if region is None else region
