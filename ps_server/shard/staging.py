"""The part of a stream's next push that has come already."""

from __future__ import annotations

from collections.abc import Sequence

from ps_protocol.errors import InvalidRequest
from ps_protocol.layout import Layout, Range, merge, subtract
from ps_server.optimizers import Region
from ps_server.shard.pool import RegionPool


class Staging:
    """Belongs to one stream, used by its reader. Owns a region of the pool from the first part on."""

    def __init__(self, layout: Layout, pool: RegionPool) -> None:
        self._layout = layout
        self._pool = pool
        self._region: Region | None = None
        self._ranges: list[Range] = []

    def place(self, begin: int, end: int) -> memoryview:
        """Where bytes [begin, end) of the region go. Raises InvalidRequest."""
        if not begin < end <= self._layout.parameter_bytes:
            raise InvalidRequest(
                "a part of a push does not lie in the region",
                shard=str(self._layout.shard),
                expected=f"begin < end, and end at most {self._layout.parameter_bytes}",
                actual=f"{begin} to {end}",
            )
        if self._region is None:
            self._region = self._pool.take()
        self._ranges = merge(sorted([*subtract(self._ranges, [(begin, end)]), (begin, end)]))
        return self._region.bytes[begin:end]

    def checked(self, flat: Sequence[int]) -> list[Range]:
        """The ranges that a push says have come. Raises InvalidRequest when they have not."""
        ranges = list(zip(flat[::2], flat[1::2], strict=False))
        ordered = len(flat) % 2 == 0 and list(flat) == sorted(flat)
        if not ordered or any(subtract([wanted], self._ranges) for wanted in ranges):
            raise InvalidRequest(
                "a push counts on bytes that have not come ahead of it",
                shard=str(self._layout.shard),
                expected=f"ranges within {self._ranges}",
                actual=str(ranges),
                remedy="stage them on this stream after the push before, or send them in the payload",
            )
        return ranges

    def take(self) -> Region:
        """The region with what has come, for the caller to own; a free one when nothing has."""
        region, self._region, self._ranges = self._region, None, []
        return region or self._pool.take()

    def discard(self) -> None:
        """Forget what has come."""
        if self._region is not None:
            self._pool.give(self._region)
        self._region, self._ranges = None, []
