"""A worker's leases on one dataset during one epoch: requested ahead, reported when trained, returned when not."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from ps_protocol.cluster.leases import LeaseAnswer, LeaseAsk, Span
from ps_protocol.errors import PsError, Retryable
from ps_protocol.retry import COORDINATOR
from ps_protocol.times import BRIEF_CALL_SECONDS
from ps_worker import times
from ps_worker.session.reporting import log

#: One request to the coordinator, with the seconds it may wait and the deadline; repeated until it is answered.
LeaseCall = Callable[[LeaseAsk, float, float], LeaseAnswer]


class LeaseFeed:
    """Used by the training thread; owns a daemon thread that talks to the coordinator.

    One lease is fetched ahead of the one in use, so a step waits for the coordinator only when others hold all the
    data. Reports of trained items are sent with the next request, at the latest when the loop has run out of items.
    ``close`` reports the rest and returns what was not trained.
    """

    def __init__(self, call: LeaseCall, wish: LeaseAsk, sequences: Iterator[int]) -> None:
        """``wish``: every request, without its sequence and report. ``sequences`` rise over all feeds of a process."""
        self._call = call
        self._wish = wish
        self._sequences = sequences
        self._pid = os.getpid()
        #: Guards everything below; notified at every change.
        self._changed = threading.Condition()
        self._ready: deque[Span] = deque()
        #: Epoch of the leases: an earlier one than requested while that has items left.
        self.lease_epoch = wish.epoch
        self._trained: list[Span] = []
        #: Sequence of the request without an answer. It is repeated, since its answer may be a lease.
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
        self._thread = threading.Thread(target=self._run, name=f"ps-leases-{wish.dataset}", daemon=True)
        self._thread.start()

    def take(self) -> Span | None:
        """The next lease; None when there is none at once, or no more. Waits for an answer that is under way.

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
        """The loop has no items: whether a lease, or the end of the epoch (``done``), came within ``seconds``.

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

    def trained(self, span: Span) -> None:
        """Report ``span``, of the epoch of the leases, as trained."""
        with self._changed:
            if self._trained and self._trained[-1].end == span.begin:
                self._trained[-1] = Span(self._trained[-1].begin, span.end)
            else:
                self._trained.append(span)

    def close(self) -> None:
        """Report what was trained and return the rest. Takes seconds at most, raises nothing, may be repeated."""
        with self._changed:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
            self._changed.notify_all()
            if self._done or self._error is not None:
                return
            # A request under way has a lower sequence: it comes before this one, or is refused.
            ask = self._request(next(self._sequences), 0)
        try:
            self._call(ask, 0.0, BRIEF_CALL_SECONDS)
        except PsError as error:
            log.warning(
                "leases", "leases on '%s' are given back when this worker leaves: %s", self._wish.dataset, error
            )

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
            return self._request(self._unanswered, self._wish.lease_items), wait_seconds

    def _request(self, sequence: int, lease_items: int) -> LeaseAsk:
        trained = tuple(self._trained)
        return replace(
            self._wish, sequence=sequence, lease_items=lease_items, trained=trained, trained_epoch=self.lease_epoch
        )

    def _take_in(self, ask: LeaseAsk, answer: LeaseAnswer, away: Retryable | None) -> None:
        with self._changed:
            self.away, self.holders = away, answer.holders
            self._stalled = answer.span is None
            if away is None:
                self._unanswered, self._pause_seconds = None, 0.0
                self._forget_reported(ask.trained)
                self._done = answer.done
                self.lease_epoch = answer.epoch
            if answer.span is not None:
                self._ready.append(answer.span)
            self._changed.notify_all()

    def _forget_reported(self, reported: tuple[Span, ...]) -> None:
        """Drop ``reported`` from what is to be reported; its last range may have grown since."""
        if reported:
            grown = Span(reported[-1].end, self._trained[len(reported) - 1].end)
            self._trained[: len(reported)] = [grown] if len(grown) else []
