"""Parked pulls: those that may not be answered yet, found again without looking at all of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

from ps_server.consistency.events import Position
from ps_server.consistency.tracker import Tracker

T = TypeVar("T")


class ParkedPulls(Generic[T]):
    """Used from the loop that drives the Tracker. ``T`` is what the caller answers a pull with.

    At any moment a pull of a lower position is answered no later than one of a higher, in every mode; so the lowest
    alone says whether there is anything to release, also after the mode has changed.
    """

    def __init__(self) -> None:
        #: Position, order of parking, token.
        self._heap: list[tuple[Position, int, T]] = []
        self._parked = 0
        #: The lowest position of a parked pull; None when there is none.
        self.lowest: Position | None = None

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[T]:
        """The tokens, in no particular order."""
        return (token for _, _, token in self._heap)

    def park(self, position: Position, token: T) -> None:
        """Keep ``token`` until a pull of a worker that stands at ``position`` may be answered."""
        self._parked += 1
        heapq.heappush(self._heap, (position, self._parked, token))
        self._note_lowest()

    def release(self, tracker: Tracker) -> list[T]:
        """Take out what may be answered now: lowest position first, then first parked."""
        tokens = []
        while self._heap and tracker.may_pull(self._heap[0][0]):
            tokens.append(heapq.heappop(self._heap)[2])
        self._note_lowest()
        return tokens

    def discard(self, token: T) -> None:
        """Forget ``token`` (its stream broke); nothing happens when it is not parked. Looks at all that are."""
        kept = [entry for entry in self._heap if entry[2] is not token]
        if len(kept) < len(self._heap):
            heapq.heapify(kept)
            self._heap = kept
            self._note_lowest()

    def _note_lowest(self) -> None:
        self.lowest = self._heap[0][0] if self._heap else None
