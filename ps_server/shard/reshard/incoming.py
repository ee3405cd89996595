"""Memory that slices come into before they are the model's: touched ahead of the move, and used again."""

from __future__ import annotations

from ps_protocol.model.layout import Layout
from ps_server.state.reshard import rows_of


class IncomingMemory:
    """Of one shard; ``take`` and ``give`` on its event loop, ``make`` anywhere. What is taken is its taker's alone."""

    def __init__(self) -> None:
        self._free = bytearray()

    def make(self, size_bytes: int) -> None:
        """Have so many bytes, all their pages touched."""
        if len(self._free) < size_bytes:
            self._free = bytearray(size_bytes)

    def take(self, size_bytes: int) -> memoryview:
        """Memory with unspecified content; new where there is not enough."""
        self.make(size_bytes)
        taken, self._free = self._free, bytearray()
        return memoryview(taken)[:size_bytes]

    def give(self, taken: memoryview) -> None:
        """What ``take`` gave is not read any more, and nothing writes to it."""
        if isinstance(taken.obj, bytearray):
            self._free = max(taken.obj, self._free, key=len)

    def clear(self) -> None:
        """Keep nothing."""
        self._free = bytearray()


def coming_bytes(held: Layout, wanted: Layout) -> int:
    """Bytes of the slices of ``wanted`` that are not in ``held``."""
    here = {rows_of(span) for span in held.slices}
    return sum(span.end - span.begin for span in wanted.slices if rows_of(span) not in here)
