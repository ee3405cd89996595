"""A DataLoader over leases: the coordinator decides while it runs which samples it yields."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

from torch.utils.data import DataLoader, IterableDataset, Sampler, SequentialSampler

from ps_protocol.cluster.leases import IntervalSet, LeaseAnswer, LeaseAsk, Span
from ps_protocol.errors import ConfigError, PsError, Retryable
from ps_protocol.retry import COORDINATOR
from ps_protocol.times import BRIEF_CALL_SECONDS
from ps_worker import times
from ps_worker.data.samples import OwnPart, batch_samples, common_order, rebuilt
from ps_worker.session.reporting import log
from ps_worker.session.session import Session

#: One request to the coordinator, with the seconds it may wait and the deadline; repeated until it is answered.
LeaseCall = Callable[[LeaseAsk, float, float], LeaseAnswer]


class LeaseFeed:
    """Used by the training thread; owns a daemon thread that talks to the coordinator.

    One lease is fetched ahead of the one in use, so a step waits for the coordinator only when others hold all the
    data. Reports of trained items are sent with the next request, at the latest when the loop has run out of items.
    ``close`` reports the rest and returns what was not trained.
    """

    def __init__(self, call: LeaseCall, ask: LeaseAsk, sequences: Iterator[int]) -> None:
        """``ask``: the template of every request, without sequence; its report goes with the first ones. ``sequences``
        rise over all feeds of a process.
        """
        self._call = call
        self._ask = ask
        self._sequences = sequences
        self._pid = os.getpid()
        #: Guards everything below; notified at every change.
        self._changed = threading.Condition()
        self._ready: deque[Span] = deque()
        #: Epoch of the leases: earlier than the requested one while the earlier one has items left.
        self.lease_epoch = ask.trained_epoch if ask.trained else ask.epoch
        #: Not reported yet.
        self._trained = list(ask.trained)
        #: Leased and not trained. Every request says so: an answer may be lost, or a request come after its repetition.
        self._held = IntervalSet()
        #: Sequence of the unanswered request, which is repeated: its answer may be a lease.
        self._unanswered: int | None = None
        #: The last answer had no lease.
        self._stalled = False
        #: The loop has trained all its items.
        self._dry = False
        self._done = self._closed = False
        self._error: PsError | None = None
        #: Why the coordinator does not answer; None while it does.
        self.away: Retryable | None = None
        self._pause_seconds = 0.0
        #: Ranks that hold the remaining items, while there is nothing to lease.
        self.holders: tuple[int, ...] = ()
        self._start()

    def _start(self) -> None:
        threading.Thread(target=self._run, name=f"ps-leases-{self._ask.dataset}", daemon=True).start()

    def take(self) -> Span | None:
        """The next lease; None if none is available now, or the epoch has ended. Waits for an outstanding answer.

        Raises PsError: why no more leases come.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._stalled or self._ended)
            self._raise_error()
            if not self._ready:
                return None
            span = self._ready.popleft()
            self._dry = False
            self._changed.notify_all()
            return span

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for a lease or the end of the epoch (``done``); whether either came.

        Raises PsError: why no more leases come.
        """
        with self._changed:
            self._dry = True
            self._changed.notify_all()
            settled = self._changed.wait_for(lambda: self._ready or self._ended, seconds)
            self._raise_error()
            return bool(settled)

    @property
    def done(self) -> bool:
        """The epoch is finished, or the feed closed, and no lease is left."""
        with self._changed:
            return self._ended and not self._ready

    @property
    def ready(self) -> bool:
        """Whether ``take`` has a lease without waiting."""
        with self._changed:
            return bool(self._ready)

    def trained(self, span: Span) -> None:
        """Report ``span``, of the epoch of the leases, as trained."""
        with self._changed:
            self._held.remove(span)
            if self._trained and self._trained[-1].end == span.begin:
                self._trained[-1] = Span(self._trained[-1].begin, span.end)
            else:
                self._trained.append(span)

    def close(self) -> None:
        """Report what was trained and give back the rest. Takes a few seconds at most, raises nothing, may be
        repeated.
        """
        with self._changed:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
            if self._done or self._error is not None:
                return
            # An outstanding request has a lower sequence: it arrives before this one, or is refused.
            ask = self._request(next(self._sequences), 0)
        try:
            self._call(ask, 0.0, BRIEF_CALL_SECONDS)
        except PsError as error:
            log.warning(
                "leases",
                "leases on '%s' are given back with the next epoch, or when this worker leaves: %s",
                self._ask.dataset,
                error,
            )
        else:
            with self._changed:
                self._trained = []

    @property
    def unreported(self) -> tuple[tuple[Span, ...], int]:
        """What was trained and is in no report that was answered, and its epoch."""
        with self._changed:
            return tuple(self._trained), self.lease_epoch

    @property
    def _ended(self) -> bool:
        return self._done or self._closed or self._error is not None

    def _raise_error(self) -> None:
        if self._error is not None and not self._ready:
            raise self._error

    def _run(self) -> None:
        while (request := self._next_request()) is not None:
            ask, wait_seconds = request
            try:
                answer = self._call(ask, wait_seconds, BRIEF_CALL_SECONDS)
            except Retryable as error:
                self._take_in(ask, LeaseAnswer(epoch=self.lease_epoch), error)
            except PsError as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
            else:
                self._take_in(ask, answer, None)

    def _next_request(self) -> tuple[LeaseAsk, float] | None:
        with self._changed:
            if self.away is not None:
                self._pause_seconds = COORDINATOR.after(self._pause_seconds)
                self._changed.wait_for(lambda: self._ended, self._pause_seconds)
            elif self._stalled and not self._dry:
                self._changed.wait_for(lambda: self._dry or self._ended, times.LEASE_SECONDS)
            self._changed.wait_for(lambda: not self._ready or self._ended)
            if self._ended:
                return None
            if self._unanswered is None:
                self._unanswered = next(self._sequences)
            # Only a request without a report is parked, since others may wait for the report; and not the first one,
            # so that the holders of the remaining items are known soon.
            wait_seconds = times.LEASE_SECONDS if self._dry and self._stalled else 0.0
            return self._request(self._unanswered, self._ask.lease_items), wait_seconds

    def _request(self, sequence: int, lease_items: int) -> LeaseAsk:
        return replace(
            self._ask,
            sequence=sequence,
            lease_items=lease_items,
            trained=tuple(self._trained),
            trained_epoch=self.lease_epoch,
            held=tuple(self._held),
        )

    def _take_in(self, ask: LeaseAsk, answer: LeaseAnswer, away: Retryable | None) -> None:
        with self._changed:
            if self._closed:
                # The last request says it all, and may have been answered before this one.
                return
            self.away, self.holders = away, answer.holders
            self._stalled = answer.span is None
            if away is None:
                self._unanswered, self._pause_seconds = None, 0.0
                self._forget_reported(ask.trained)
                self._done = answer.done
                self.lease_epoch = answer.epoch
            if answer.span is not None:
                self._held.add(answer.span)
                self._ready.append(answer.span)
            self._changed.notify_all()

    def _forget_reported(self, reported: tuple[Span, ...]) -> None:
        """Remove ``reported`` from the pending report; its last range may have grown since."""
        if reported:
            grown = Span(reported[-1].end, self._trained[len(reported) - 1].end)
            self._trained[: len(reported)] = [grown] if len(grown) else []


T = TypeVar("T")

LEASES_PER_EPOCH = 8
"""About how many leases make up one worker's part of an epoch."""

MOST_BATCHES = 64
"""The most batches of a lease. Another worker trains all of a lease again when its holder is killed."""


class LeasedItems:
    """The items of one dataset that this worker leases, epoch after epoch. Used from the training thread.

    Who reads the items notes their positions in order (``note``), says when the loop gets a batch (``handed_out``), and
    when it has finished it (``trained``): then it is reported.
    """

    #: What asks the coordinator.
    feed_class: type[LeaseFeed] = LeaseFeed

    def __init__(self, ask: LeaseAsk, session: Session, epochs: Iterator[int]) -> None:
        """``ask``: the template of requests, without epoch, sequence and report. ``epochs`` gives the number of the
        next epoch.
        """
        self._ask = ask
        self._session = session
        self._epochs = epochs
        self._feed: LeaseFeed | None = None
        #: What the last iteration trained and could not report, and its epoch.
        self._unreported: tuple[tuple[Span, ...], int] = (), 0
        #: Noted and not reported yet, in order.
        self._sampled: deque[Span] = deque()
        #: The number of steps when the loop got its current batch, and the positions of this batch; None if it has
        #: none.
        self._current: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """The name of the dataset."""
        return self._ask.dataset

    def start_epochs(self, first: int) -> None:
        """The next iteration is epoch ``first``, and those after it the epochs that follow."""
        self._epochs = itertools.count(first)

    def begin(self) -> LeaseFeed:
        """Start the next epoch; an iteration of the dataset that is still open is ended, also one of another loader."""
        if (end_open := self._session.iterating.pop(self.name, None)) is not None:
            end_open()
        self._session.iterating[self.name] = self.end
        self._sampled.clear()
        trained, epoch = self._unreported
        ask = replace(
            self._ask,
            epoch=next(self._epochs),
            lease_items=self._lease_items(),
            trained=trained,
            trained_epoch=epoch,
        )
        feed = self._feed = self.feed_class(self._call, ask, self._session.sequences)
        return feed

    def wait_for_items(self, feed: LeaseFeed, idle: Callable[[], AbstractContextManager[None]]) -> bool:
        """Wait until there is a lease; False at the end of the epoch. ``idle`` is entered when that takes long.

        Raises Fenced, Unavailable when the coordinator stays away, InvalidRequest for data others do not have.
        """
        if not feed.wait(0.02):
            with idle():
                self._wait_long(feed)
        return not feed.done

    def note(self, span: Span) -> None:
        """Note the next positions that were read."""
        if self._sampled and self._sampled[-1].end == span.begin:
            self._sampled[-1] = Span(self._sampled[-1].begin, span.end)
        else:
            self._sampled.append(span)

    def handed_out(self, positions: int) -> None:
        """Note that the loop gets a batch: the oldest ``positions`` noted."""
        self._current = self._session.stepped, positions

    def trained(self, feed: LeaseFeed, positions: int | None = None) -> None:
        """Note that the loop has finished the oldest ``positions`` noted; by default, or if there are fewer, all."""
        with self._session.termination.section():
            self._current = None
            left = self._ask.length if positions is None else positions
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
        self._session.iterating.pop(self.name, None)
        if self._current is not None and self._session.stepped > self._current[0]:
            self.trained(feed, self._current[1])
        self._current = None
        feed.close()
        self._unreported = feed.unreported

    def _lease_items(self) -> int:
        """The most items of a lease."""
        return self._ask.lease_items

    def _call(self, ask: LeaseAsk, wait_seconds: float, timeout_seconds: float) -> LeaseAnswer:
        """Ask the coordinator once."""
        return self._session.lease_data(ask, wait_seconds, timeout_seconds)

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


class LeasedData(LeasedItems, OwnPart, Sampler[Any]):
    """The leased items of a sampler that all workers have. Used from the training thread.

    As a sampler it yields the items of the leases at hand and ends when none is available at once.
    """

    def __init__(
        self, source: Iterable[Any], name: str, batch_items: int, session: Session, epochs: Iterator[int]
    ) -> None:
        """``source`` is the sampler all workers have. Raises TypeError when it has no length."""
        self._source = source
        self._length = len(source)  # type: ignore[arg-type]  # TypeError as from the source itself
        self._batch_items = batch_items
        #: The order of an epoch.
        self._order: tuple[int, Sequence[Any]] = (-1, ())
        ask = LeaseAsk(name, self._length, epoch=0, lease_items=0, sequence=0, batch_items=batch_items)
        super().__init__(ask, session, epochs)

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
                self.note(Span(position, position + 1))
                yield order[position]

    def _lease_items(self) -> int:
        return lease_items(self._length, self._batch_items, len(self._session.workers))

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
                    leases.handed_out(items)
                    self.on_samples(batch_samples(batch) if batched else 1)
                    yield batch
                    leases.trained(feed, items)
                # Items that drop_last omits count as trained.
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
