"""Memory that slices come into before they are the model's: touched ahead of the move, and used again."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ps_protocol.model.layout import Layout, SliceSpan, aligned
from ps_server.state.reshard import rows_of


class IncomingBlock:
    """Of one model in one batch; cut from the front. Used on the event loop."""

    def __init__(self, memory: bytearray) -> None:
        #: All of it, for the next batch when nobody reads what was cut.
        self.memory = memory
        self._used = 0

    def cut(self, size_bytes: int) -> memoryview:
        """Memory with unspecified content; new where there is not enough."""
        begin = aligned(self._used)
        if begin + size_bytes > len(self.memory):
            return memoryview(bytearray(size_bytes))
        self._used = begin + size_bytes
        return memoryview(self.memory)[begin : self._used]

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The same as a tensor."""
        count = math.prod(shape)
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(self.cut(count * dtype.itemsize), dtype=dtype).view(tuple(shape))


class IncomingMemory:
    """Of one shard; ``take`` and ``give`` on its event loop, ``make`` anywhere. What is taken is its taker's alone."""

    def __init__(self) -> None:
        self._free = bytearray()

    def make(self, size_bytes: int) -> None:
        """Have so many bytes, all their pages touched."""
        if len(self._free) < size_bytes:
            self._free = bytearray(size_bytes)

    def take(self) -> IncomingBlock:
        """All there is."""
        taken, self._free = self._free, bytearray()
        return IncomingBlock(taken)

    def give(self, block: IncomingBlock) -> None:
        """What was cut from ``block`` is not read any more, and nothing writes to it."""
        self._free = max(block.memory, self._free, key=len)

    def clear(self) -> None:
        """Keep nothing."""
        self._free = bytearray()


def coming_slices(held: Layout, wanted: Layout) -> list[SliceSpan]:
    """The slices of ``wanted`` that are not in ``held``."""
    here = {rows_of(span) for span in held.slices}
    return [span for span in wanted.slices if rows_of(span) not in here]
