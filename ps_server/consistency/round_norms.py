"""The squared norms of this shard's parts of the last rounds, and the round that waits for those of other shards."""

from __future__ import annotations

from collections.abc import Iterable

from ps_server.consistency.events import Position

KEPT_NORMS = 8
"""Rounds whose norm is remembered. Another shard is at most one behind: it cannot be passed before it has answered."""


class RoundNorms:
    """Used by one Tracker, of a model whose gradients are clipped; empty for others."""

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
        """Of the last rounds taken, in their order."""
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
        """Know these again."""
        for position, squared_norm in kept:
            self.note(position, squared_norm)

    def of(self, position: Position) -> float | None:
        """The part of one round; None: not known."""
        return self.part if position == self.closed else self._kept.get(position)
