"""Leases on data as worker and coordinator speak of them: ranges of the common order of an epoch."""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class LeaseAsk:
    """What a worker tells about its data, and what it wants."""

    dataset: str
    #: Items of the dataset, or batches where a batch sampler makes them; the same from every worker.
    length: int
    #: The epoch the worker iterates: it is served until that one is finished.
    epoch: int
    #: The most items it wants; 0: none, and what it holds is given back.
    lease_items: int
    #: Rises with every new ask of one incarnation; a repetition has the same.
    sequence: int
    #: What it has trained of its leases since its last ask, in epoch ``trained_epoch``; to repeat it is harmless.
    trained: tuple[Span, ...] = ()
    trained_epoch: int = 0


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    """What a worker gets: a range, or the end of its epoch, or neither: then others hold all there is."""

    #: The range leased, of epoch ``epoch``.
    span: Span | None = None
    epoch: int = 0
    #: The epoch asked for is finished: every item was trained.
    done: bool = False
    #: Ranks that hold what is left, when there is nothing to lease.
    holders: tuple[int, ...] = ()
