"""The rounds of the synchronous mode: pushes that wait for the others of their step, and norms of the last rounds."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from ps_server.consistency.events import FOREVER, Position, PushInfo, WorkerKey


class PendingRounds:
    """The rounds that wait for pushes. Used by one Tracker.

    A push stays in its round until that is taken; the lowest round is taken first.
    """

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
        """The pushes of the lowest round, by rank; the round stays. Raises KeyError when there is none."""
        return _to_apply(self._pushes[self.lowest])

    def open(self) -> dict[WorkerKey, int]:
        """By worker, the first sequence of its pushes that are in a round, skipped ones included."""
        first: dict[WorkerKey, int] = {}
        for pushes in self._pushes.values():
            for each in (one for push in pushes for one in push.contributions):
                first[each.worker] = min(each.sequence, first.get(each.worker, each.sequence))
        return first

    def take(self) -> tuple[Position, tuple[PushInfo, ...]]:
        """Remove the lowest round: its position, and its pushes by rank. Raises IndexError when there is none."""
        position = heapq.heappop(self._heap)
        self.lowest = self._heap[0] if self._heap else FOREVER
        return position, _to_apply(self._pushes.pop(position))


def _rank_order(push: PushInfo) -> WorkerKey:
    return push.first_worker if push.others else push.worker


def _to_apply(pushes: Iterable[PushInfo]) -> tuple[PushInfo, ...]:
    return tuple(sorted((push for push in pushes if not push.skipped), key=_rank_order))


KEPT_NORMS = 8
"""Rounds whose norm is remembered. Another shard is at most one behind: it cannot be passed before it has answered."""


class RoundNorms:
    """The norms of one model's rounds, empty where gradients are not clipped. Used by one Tracker."""

    def __init__(self) -> None:
        #: The round whose pushes are settled, while it waits for the norms of other shards.
        self.closed: Position | None = None
        #: This shard's part of it; None: not computed yet.
        self.part: float | None = None
        #: What it waits for, for people.
        self.waits_for = ""
        self._kept: dict[Position, float] = {}

    @property
    def kept(self) -> tuple[tuple[Position, float], ...]:
        """The norms of the last rounds taken, in the order of the rounds."""
        return tuple(self._kept.items())

    def close(self, position: Position) -> None:
        """No further push belongs to the round of ``position``."""
        self.closed, self.part, self.waits_for = position, None, ""

    def taken(self, squared_norm: float) -> None:
        """The closed round is taken."""
        if self.closed is not None:
            self.note(self.closed, squared_norm)
        self.closed = self.part = None

    def note(self, position: Position, squared_norm: float) -> None:
        """The round of ``position`` was taken with this part."""
        self._kept.pop(position, None)
        self._kept[position] = squared_norm
        while len(self._kept) > KEPT_NORMS:
            del self._kept[next(iter(self._kept))]

    def restore(self, kept: Iterable[tuple[Position, float]]) -> None:
        """Take over the norms of an earlier process."""
        for position, squared_norm in kept:
            self.note(position, squared_norm)

    def of(self, position: Position) -> float | None:
        """The part of one round; None: not known."""
        return self.part if position == self.closed else self._kept.get(position)
