"""Judges which worker trains which items of a dataset."""

from __future__ import annotations

from collections.abc import Iterable

from ps_protocol.cluster.leases import LeaseAnswer, LeaseAsk, Span

Item = tuple[int, int]
"""Epoch and position."""


class LeasedItems:
    """What the coordinator has heard and answered about one dataset."""

    def __init__(self) -> None:
        self._holder: dict[Item, tuple[int, int]] = {}
        self._trained: set[Item] = set()
        self._reported: set[Item] = set()
        #: Of the last request of each worker.
        self._sequence: dict[tuple[int, int], int] = {}

    def began_with(self, epoch: int, items: Iterable[int]) -> None:
        """These were trained before the job began with a checkpoint."""
        found = {(epoch, item) for item in items}
        self._trained |= found
        self._reported |= found

    def reported(self, who: tuple[int, int], ask: LeaseAsk) -> None:
        """The coordinator has heard from ``who``, a rank and incarnation, which items were trained."""
        self._reported.update(_items(ask.trained, ask.trained_epoch))
        # It gives back what it has not trained, or does not have what it does not name.
        kept: set[Item] | None = set() if not ask.lease_items else None
        if kept is None and ask.held is not None and ask.sequence > self._sequence.get(who, 0):
            kept = set(_items(ask.held, ask.trained_epoch))
        self._sequence[who] = max(ask.sequence, self._sequence.get(who, 0))
        if kept is not None:
            self._holder = {item: holder for item, holder in self._holder.items() if holder != who or item in kept}

    def leased(self, who: tuple[int, int], live: set[tuple[int, int]], ask: LeaseAsk, answer: LeaseAnswer) -> str:
        """``who``, a rank and incarnation, got ``answer``; what is wrong with it, if anything is."""
        for item in _items(ask.trained, ask.trained_epoch):
            self._trained.add(item)
            self._holder.pop(item, None)
        for item in _items((answer.span,) if answer.span is not None else (), answer.epoch):
            holder = self._holder.get(item, who)
            if holder != who and holder in live:
                return f"item {item} is leased to {who} while {holder} holds it"
            if item in self._trained:
                return f"item {item} is leased again after it was trained"
            self._holder[item] = who
        done = sum(epoch == ask.epoch for epoch, _ in self._reported)
        if answer.done and done < ask.length:
            return f"epoch {ask.epoch} was called finished with {done} of {ask.length} items trained"
        return ""


def _items(spans: Iterable[Span], epoch: int) -> list[Item]:
    return [(epoch, at) for span in spans for at in range(span.begin, span.end)]
