"""A DataLoader over leases: the coordinator decides while it runs which samples it yields."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch.utils.data import DataLoader, IterableDataset, Sampler, SequentialSampler

from ps_protocol.cluster.leases import LeaseAsk, Span
from ps_protocol.errors import ConfigError
from ps_worker.data.leases import LeaseFeed
from ps_worker.data.samples import OwnPart, batch_samples, common_order, rebuilt
from ps_worker.session.session import Session

T = TypeVar("T")

LEASES_PER_EPOCH = 8
"""About how many leases make up one worker's part of an epoch."""

MOST_BATCHES = 64
"""The most batches of a lease. Another worker trains all of a lease again when its holder is killed."""


class LeasedData(OwnPart, Sampler[Any]):
    """The items of one dataset that this worker leases, epoch after epoch. Used from the training thread.

    As a sampler it yields the items of the leases at hand and ends when none is available at once. It records the
    sampled positions in order and reports those whose batches the training loop has finished.
    """

    def __init__(
        self, source: Iterable[Any], name: str, batch_items: int, session: Session, epochs: Iterator[int]
    ) -> None:
        """``source`` is the sampler all workers have. Raises TypeError when it has no length."""
        self._source = source
        self._length = len(source)  # type: ignore[arg-type]  # TypeError as from the source itself
        self.name = name
        self._batch_items = batch_items
        self._session = session
        self._epochs = epochs
        self._feed: LeaseFeed | None = None
        self._order: tuple[int, Sequence[Any]] = (-1, ())
        #: Sampled and not reported yet, in the order sampled.
        self._sampled: deque[Span] = deque()
        #: Steps made when the loop got its present batch; None when it has none.
        self._steps_before: int | None = None

    @property
    def whole(self) -> object:
        """The sampler that all workers have."""
        return self._source

    def __len__(self) -> int:
        """An equal part among the live workers: an estimate, since the real number depends on the others' pace."""
        return -(-self._length // len(self._session.workers))

    def __iter__(self) -> Iterator[Any]:
        feed = self._feed
        while feed is not None and (lease := feed.take()) is not None:
            order = self._order_of(feed.lease_epoch)
            for position in range(lease.begin, lease.end):
                self._note(position)
                yield order[position]

    def start_epochs(self, first: int) -> None:
        """The next iteration is epoch ``first``, and those after it the epochs that follow."""
        self._epochs = itertools.count(first)

    def begin(self) -> LeaseFeed:
        """Start the next epoch; an iteration still open is ended."""
        if self._feed is not None:
            self.end(self._feed)
        self._sampled.clear()
        items = lease_items(self._length, self._batch_items, len(self._session.workers))
        wish = LeaseAsk(self.name, self._length, next(self._epochs), items, sequence=0, batch_items=self._batch_items)
        feed = self._feed = LeaseFeed(self._session.lease_data, wish, self._session.sequences)
        return feed

    def wait_for_items(self, feed: LeaseFeed, idle: Callable[[], AbstractContextManager[None]]) -> bool:
        """Wait until there is a lease; False at the end of the epoch. ``idle`` is entered when that takes long.

        Raises Fenced, Unavailable when the coordinator stays away, InvalidRequest for data others do not have.
        """
        if not feed.wait(0.02):
            with idle():
                self._wait_long(feed)
        return not feed.done

    def handed_out(self) -> None:
        """The loop gets a batch."""
        self._steps_before = self._session.stepped

    def trained(self, feed: LeaseFeed, items: int | None = None) -> None:
        """The loop has finished the oldest ``items`` sampled; all of them by default, or where there are fewer."""
        with self._session.termination.section():
            self._steps_before = None
            left = self._length if items is None else items
            while left > 0 and self._sampled:
                span = self._sampled.popleft()
                part = Span(span.begin, min(span.end, span.begin + left))
                if part.end < span.end:
                    self._sampled.appendleft(Span(part.end, span.end))
                feed.trained(part)
                left -= len(part)

    def end(self, feed: LeaseFeed | None = None) -> None:
        """Report what was trained and give back the rest of the iteration of ``feed``; by default, of the open one.

        The loop's present batch counts as trained when an optimizer step was made since the loop got it.
        """
        if self._feed is None or feed not in (None, self._feed):
            return
        feed, self._feed = self._feed, None
        if self._steps_before is not None and self._session.stepped > self._steps_before:
            self.trained(feed, self._batch_items)
        self._steps_before = None
        feed.close()

    def _wait_long(self, feed: LeaseFeed) -> None:
        answered = time.monotonic()
        while not feed.wait(0.5):
            self._session.check()
            if feed.away is None:
                answered = time.monotonic()
                held = ", ".join(map(str, feed.holders)) or "others"
                self._session.wait_hint(f"waiting for the last items of '{self.name}': worker {held} has them")
            elif time.monotonic() - answered > self._session.patience_seconds:
                raise feed.away
            else:
                self._session.wait_hint(f"waiting for items of '{self.name}': {feed.away.message}")

    def _note(self, position: int) -> None:
        if self._sampled and self._sampled[-1].end == position:
            self._sampled[-1] = Span(self._sampled[-1].begin, position + 1)
        else:
            self._sampled.append(Span(position, position + 1))

    def _order_of(self, epoch: int) -> Sequence[Any]:
        if self._order[0] != epoch:
            self._order = epoch, self._new_order(epoch)
        return self._order[1]

    def _new_order(self, epoch: int) -> Sequence[Any]:
        if type(self._source) is SequentialSampler:
            return range(self._length)
        order = list(common_order(self._source, self._session.seed, epoch))
        if len(order) != self._length:
            raise ConfigError(
                f"the sampler of '{self.name}' does not yield what its length says",
                expected=f"{self._length} items",
                actual=f"{len(order)}",
                remedy="correct its __len__, or pass lease=False",
            )
        return order


class LeasedLoader(DataLoader[T]):
    """A DataLoader over leases. Used by the training loop.

    Each iteration is the next epoch: it yields what earlier epochs have left, then items of its own, and ends when
    every item of its epoch was trained, by this worker or another. An epoch that was finished before yields nothing.
    ``len()`` is an estimate: the batches of an equal part among the live workers.

    A batch counts as trained when the loop asks for the next one, or leaves with an optimizer step made since. At
    ``break``, an exception, SIGTERM or the end of the ``with`` block the rest is given back. A worker that is killed
    reports nothing more: its last lease, and batches prefetched after it, are trained again.
    """

    leases: LeasedData
    #: Called with the samples of each batch.
    on_samples: Callable[[int], None] = staticmethod(lambda samples: None)
    #: Entered while the loop waits for items.
    idle: Callable[[], AbstractContextManager[None]]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator instead of torch's own iterator class
        leases, feed = self.leases, self.leases.begin()
        # A user's batch sampler yields whole batches; without batching each item comes alone.
        items, batched = self.batch_size or 1, self.batch_sampler is not None
        try:
            while leases.wait_for_items(feed, self.idle):
                for batch in super().__iter__():
                    leases.handed_out()
                    self.on_samples(batch_samples(batch) if batched else 1)
                    yield batch
                    leases.trained(feed, items)
                # What drop_last leaves out counts as trained.
                leases.trained(feed)
        finally:
            leases.end(feed)


def leased(
    loader: DataLoader[T],
    name: str,
    session: Session,
    epochs: Iterator[int],
    on_samples: Callable[[int], None],
    idle: Callable[[], AbstractContextManager[None]],
) -> LeasedLoader[T]:
    """``loader`` over leases on the dataset ``name``; ``epochs`` gives the number of the next epoch.

    Batches come in the order sampled; ``in_order`` is ignored. Raises ConfigError for data that was split already.
    """
    made: list[LeasedData] = []

    def sampler_of(source: Iterable[Any]) -> LeasedData:
        made.append(LeasedData(source, name, loader.batch_size or 1, session, epochs))
        return made[0]

    result: LeasedLoader[T] = rebuilt(LeasedLoader, loader, sampler_of, in_order=True)
    result.leases, result.on_samples, result.idle = made[0], on_samples, idle
    return result


def can_lease(data: object) -> bool:
    """Whether ``data`` is a DataLoader whose items are counted: no iterable dataset, no sampler without a length."""
    if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset):
        return False
    source = data.batch_sampler if data.batch_size is None and data.batch_sampler is not None else data.sampler
    return hasattr(source, "__len__")


def lease_items(length: int, batch_items: int, workers: int) -> int:
    """Most items of a lease: whole batches, about ``LEASES_PER_EPOCH`` to a worker's part, ``MOST_BATCHES`` at most."""
    batches = -(-length // batch_items)
    return batch_items * max(1, min(MOST_BATCHES, batches // (LEASES_PER_EPOCH * max(1, workers))))
