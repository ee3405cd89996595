"""The vector of clocks: where every participant stands, and how far all but a few have come."""

from __future__ import annotations

import heapq

from ps_server.consistency.events import FOREVER, START, Position

_SPARE = 8
"""Outdated heap entries kept before the first clean-up."""


class ClockVector:
    """Used by one Tracker. Moving a participant costs O(log n) amortised; memory is O(participants).

    The minimum is kept as a heap of distinct positions. A position that everyone has left stays in the heap until it
    comes to the top, or until outdated entries outnumber the others and the heap is rebuilt.
    """

    def __init__(self) -> None:
        #: Where each participant stands, by rank; changed by ``place`` and ``remove`` alone.
        self.positions: dict[int, Position] = {}
        #: Ranks by position, in order of arrival; a position without a participant has no entry.
        self._standing: dict[Position, dict[int, None]] = {}
        #: Holds every key of ``_standing``, and outdated ones.
        self._heap: list[Position] = []
        #: The largest position anyone has ever reached.
        self.highest = START

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, rank: int) -> Position:
        return self.positions[rank]

    def place(self, rank: int, position: Position) -> None:
        """Let ``rank`` stand at ``position``, whether or not it takes part already."""
        standing = self._standing
        if (left := self.positions.get(rank)) is not None:
            ranks = standing[left]
            del ranks[rank]
            if not ranks:
                del standing[left]
        self.positions[rank] = position
        if (here := standing.get(position)) is None:
            here = standing[position] = {}
            heapq.heappush(self._heap, position)
            if len(self._heap) > 2 * len(standing) + _SPARE:
                self._heap = list(standing)
                heapq.heapify(self._heap)
        here[rank] = None
        if position > self.highest:
            self.highest = position

    def remove(self, rank: int) -> None:
        """Forget ``rank``; nothing happens when it does not take part."""
        if (position := self.positions.pop(rank, None)) is not None:
            ranks = self._standing[position]
            del ranks[rank]
            if not ranks:
                del self._standing[position]

    def frontier(self, missing: int = 0) -> Position:
        """The highest position that all participants but ``missing`` have reached; FOREVER with no more than those.

        With ``missing`` it costs O(d log d) in the number of distinct positions: the stragglers' and the front's.
        """
        if len(self.positions) <= missing:
            return FOREVER
        if missing == 0:
            while self._heap[0] not in self._standing:
                heapq.heappop(self._heap)
            return self._heap[0]
        for position in sorted(self._standing):
            missing -= len(self._standing[position])
            if missing < 0:
                return position
        return FOREVER

    def slowest(self) -> tuple[int, int]:
        """One rank that stands lowest, and how many others stand with it. Raises KeyError without participants."""
        ranks = self._standing[self.frontier()]
        return next(iter(ranks)), len(ranks) - 1
