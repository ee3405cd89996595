"""The part of a stream's next push that has come already."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import itemgetter

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Layout, Range, merge, subtract
from ps_server.state.region import Region, RegionPool

MAX_RANGES = 1 << 16
"""Ranges of one push that do not touch: far more than a model has variables that come ahead one by one."""

_SHOWN = 20


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
                "a part of a push is outside the region",
                shard=str(self._layout.shard),
                expected=f"begin < end, and end at most {self._layout.parameter_bytes}",
                actual=f"{begin} to {end}",
            )
        if self._region is None:
            self._region = self._pool.take()
        self._add(begin, end)
        return self._region.bytes[begin:end]

    def _add(self, begin: int, end: int) -> None:
        """Join [begin, end) with the ranges that it touches; takes a binary search, and a move of the later ones.

        Raises InvalidRequest for one range too many.
        """
        first = bisect_left(self._ranges, begin, key=itemgetter(1))
        last = bisect_right(self._ranges, end, key=itemgetter(0))
        touched = self._ranges[first:last]
        if not touched and len(self._ranges) >= MAX_RANGES:
            raise InvalidRequest(
                "the parts of a push are too scattered",
                shard=str(self._layout.shard),
                expected=f"at most {MAX_RANGES} ranges that do not touch",
                actual=f"{MAX_RANGES + 1}",
                remedy="stage larger parts, or send the push whole",
            )
        joined = (min(begin, touched[0][0]), max(end, touched[-1][1])) if touched else (begin, end)
        self._ranges[first:last] = [joined]

    def checked(self, flat: Sequence[int]) -> list[Range]:
        """The ranges that a push lists. Raises InvalidRequest if they have not all arrived."""
        ranges = list(zip(flat[::2], flat[1::2], strict=False))
        ordered = len(flat) % 2 == 0 and list(flat) == sorted(flat)
        if not ordered or subtract(merge(ranges), self._ranges):
            raise InvalidRequest(
                "a push counts on bytes that have not come ahead of it",
                shard=str(self._layout.shard),
                expected=f"ranges within {_shown(self._ranges)}",
                actual=_shown(ranges),
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


def _shown(ranges: Sequence[Range]) -> str:
    return str(list(ranges[:_SHOWN]))[:-1] + (f", and {len(ranges) - _SHOWN} more]" if len(ranges) > _SHOWN else "]")
