"""Data leases between worker and coordinator: ranges of the order of an epoch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Positions [begin, end) in the common order of one epoch of a dataset."""

    begin: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.begin)

    def __str__(self) -> str:
        return f"{self.begin} to {self.end - 1}" if len(self) else "nothing"


class IntervalSet:
    """A set of positions. Memory is O(ranges after merging); changes cost that too, at worst. No lock."""

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

    @property
    def positions(self) -> int:
        """How many there are. Not the length, which says of what is iterated how much room a list of it needs."""
        return sum(map(len, self))

    def add(self, span: Span) -> None:
        """Add ``span``, and merge ranges that touch."""
        if len(span):
            # Keep an edge only if its position is outside the set, so that touching ranges become one.
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

    def take(self, count: int, batch: int = 1) -> Span:
        """Remove and return up to ``count`` positions from the lowest range. They end at a multiple of ``batch`` if one
        is among them.

        Raises IndexError when the set is empty.
        """
        begin, end = self._edges[:2]
        if begin + count < end:
            end = begin + count
            end = max(end - end % batch, min(end, begin - begin % batch + batch))
        span = Span(begin, end)
        self.remove(span)
        return span


@dataclass(frozen=True, slots=True)
class LeaseAsk:
    """The report of a worker about its data, and its request."""

    dataset: str
    #: Items of the dataset, or batches of a batch sampler; equal for all workers.
    length: int
    #: The epoch that the worker iterates; it gets ranges until that epoch is finished.
    epoch: int
    #: The most items it requests; 0: none, and its leases are returned.
    lease_items: int
    #: Increased with every new request of one incarnation; a repetition has the same.
    sequence: int
    #: Ranges of its leases trained since its last request, in epoch ``trained_epoch``; may be repeated.
    trained: tuple[Span, ...] = ()
    trained_epoch: int = 0
    #: Items of a batch: a lease is whole batches. 0: it gets all it requests, however fast it is.
    batch_items: int = 0
    #: What the items are read from, such as checksums of files; equal for all workers. Empty: not known.
    fingerprint: str = ""
    #: The ranges of its leases that are not in a report, of epoch ``trained_epoch``; whatever else is leased to it
    #: becomes free, for it does not know of that. None: it does not say.
    held: tuple[Span, ...] | None = None


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    """The answer to a worker: a range, or the end of its epoch, or neither: then others have leases on the rest."""

    #: The range leased, of epoch ``epoch``.
    span: Span | None = None
    epoch: int = 0
    #: The requested epoch is finished: every item was trained.
    done: bool = False
    #: Ranks that hold the rest, when there is nothing to lease.
    holders: tuple[int, ...] = ()
    #: That of the dataset, if the worker gave another one: then nothing was reported, and nothing is leased.
    fingerprint: str = ""
