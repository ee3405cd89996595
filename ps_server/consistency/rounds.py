"""Pending rounds of the synchronous mode: pushes that wait for the others of their step."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from ps_server.consistency.events import FOREVER, Position, PushInfo, WorkerKey


class PendingRounds:
    """Used by one Tracker. Holds each added push until its round is taken; rounds are taken lowest first."""

    def __init__(self) -> None:
        self._pushes: dict[Position, list[PushInfo]] = {}
        #: The keys of ``_pushes``.
        self._heap: list[Position] = []
        #: Position of the lowest pending round; FOREVER when there is none.
        self.lowest = FOREVER

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, push: PushInfo) -> None:
        """Put ``push`` into the round of its position; a skipped one opens the round and is not applied with it."""
        if push.position not in self._pushes:
            self._pushes[push.position] = []
            heapq.heappush(self._heap, push.position)
            self.lowest = self._heap[0]
        self._pushes[push.position].append(push)

    def __contains__(self, position: Position) -> bool:
        return position in self._pushes

    def first(self) -> tuple[PushInfo, ...]:
        """The pushes of the lowest round by rank, which stays. Raises KeyError when there is none."""
        return _to_apply(self._pushes[self.lowest])

    def open(self) -> dict[WorkerKey, int]:
        """By worker, the first sequence of its pushes that are in a round, skipped ones included."""
        first: dict[WorkerKey, int] = {}
        for push in (push for pushes in self._pushes.values() for push in pushes):
            first[push.worker] = min(push.sequence, first.get(push.worker, push.sequence))
        return first

    def take(self) -> tuple[Position, tuple[PushInfo, ...]]:
        """Remove the lowest round: its position, and its pushes by rank. Raises IndexError when there is none."""
        position = heapq.heappop(self._heap)
        self.lowest = self._heap[0] if self._heap else FOREVER
        return position, _to_apply(self._pushes.pop(position))


def _to_apply(pushes: Iterable[PushInfo]) -> tuple[PushInfo, ...]:
    return tuple(sorted((push for push in pushes if not push.skipped), key=lambda push: push.worker))
