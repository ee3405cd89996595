"""A set of positions, as disjoint ranges that do not touch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from ps_protocol.cluster.leases import Span


class IntervalSet:
    """Used by DataLeases. Memory is O(ranges after merging); changes cost that too, at worst."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        #: Begins and ends of the ranges, ascending: b0 < e0 < b1 < e1 …
        self._edges: list[int] = []
        for span in spans:
            self.add(span)

    def __iter__(self) -> Iterator[Span]:
        """The ranges, lowest first."""
        return (Span(self._edges[i], self._edges[i + 1]) for i in range(0, len(self._edges), 2))

    def __bool__(self) -> bool:
        return bool(self._edges)

    def __len__(self) -> int:
        """Positions in the set."""
        return sum(map(len, self))

    def add(self, span: Span) -> None:
        """Add ``span``, and merge ranges that touch."""
        if len(span):
            # An edge stays where the position is outside the set; touching ranges become one.
            left, right = bisect_left(self._edges, span.begin), bisect_right(self._edges, span.end)
            self._edges[left:right] = [span.begin] * (left % 2 == 0) + [span.end] * (right % 2 == 0)

    def remove(self, span: Span) -> None:
        """Remove ``span``, as far as it is in the set."""
        if len(span):
            left, right = bisect_left(self._edges, span.begin), bisect_right(self._edges, span.end)
            self._edges[left:right] = [span.begin] * (left % 2) + [span.end] * (right % 2)

    def overlaps(self, span: Span) -> bool:
        """Whether any position of ``span`` is in the set."""
        if not len(span):
            return False
        place = bisect_right(self._edges, span.begin)
        return place % 2 == 1 or (place < len(self._edges) and self._edges[place] < span.end)

    def covers(self, span: Span) -> bool:
        """Whether every position of ``span``, which is not empty, is in the set."""
        place = bisect_right(self._edges, span.begin)
        return place % 2 == 1 and span.end <= self._edges[place]

    def take(self, count: int) -> Span:
        """Remove and return up to ``count`` positions from the lowest range. Raises IndexError when it is empty."""
        span = Span(self._edges[0], min(self._edges[1], self._edges[0] + count))
        self.remove(span)
        return span
