"""Data leases between worker and coordinator: ranges of the order of an epoch."""

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
