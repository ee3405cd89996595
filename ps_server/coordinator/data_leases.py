"""Decides which worker trains which items: leases on ranges of datasets."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ps_protocol.cluster.leases import IntervalSet, LeaseAnswer, LeaseAsk, Span
from ps_protocol.errors import Fenced, InvalidRequest
from ps_server.coordinator.changes import StateChange

PART = 0.5
"""A lease is at most this part of what its holder can still train in this epoch."""

UNKNOWN_PART = 8
"""A worker whose speed is not known gets this part of what it asks for, as a divisor."""

_LEAST_SPEED = 1e-9
"""Items per second that a worker is taken to train at least: times are divided by speeds."""

_KEPT = 0.75
"""What a measured speed keeps of its past with each report."""


@dataclass(slots=True)
class Pace:
    """How fast one worker trains the items of one dataset. Times are seconds of any steady clock."""

    items: float = 0.0
    seconds: float = 0.0
    #: The begin of work not counted yet: the last report, or the first lease after a time without one; None: no lease
    #: yet.
    since: float | None = None

    def leased(self, now: float, *, had_none: bool) -> None:
        """Note that the worker gets a lease; time without a lease is not work."""
        if had_none:
            self.since = now

    def reported(self, items: int, now: float) -> None:
        """Note that the worker has trained ``items`` since its last report."""
        if self.since is None:
            self.since = now
            return
        self.items = _KEPT * self.items + items
        self.seconds = _KEPT * self.seconds + max(0.0, now - self.since)
        self.since = now

    def worker(self, held: int, now: float) -> PacedWorker:
        """The current state of the worker, which has leases on ``held`` items."""
        elapsed = 0.0 if self.since is None else max(0.0, now - self.since)
        speed = self.items / self.seconds if self.seconds > 0.0 else None
        if speed is not None and held and speed * elapsed > held:
            # It should have reported them by now: the speed of a stalled worker falls as time passes.
            speed = held / elapsed
        return PacedWorker(held, 0.0 if speed is None else min(float(held), speed * elapsed), speed)


@dataclass(frozen=True, slots=True)
class PacedWorker:
    """A worker with its part of an epoch."""

    #: Items leased to it and not reported yet.
    held: int
    #: About how many of these it has trained.
    begun: float = 0.0
    #: Items per second; None: not known yet.
    speed: float | None = None

    @property
    def left(self) -> float:
        """About how many items it still has to train."""
        return self.held - self.begun


def lease_size(asked: int, batch: int, free: int, worker: PacedWorker, others: Collection[PacedWorker]) -> int:
    """How many of ``free`` items ``worker`` gets; 0: none, since ``others`` finish sooner without it.

    ``asked``: the most it wants. Leases are whole batches of ``batch`` items, except for the last one. ``others``:
    workers with leases; if there are none, ``worker`` gets at least one batch.
    """
    if batch < 1 or free < 1:
        return min(asked, free)
    known = [each.speed for each in (worker, *others) if each.speed is not None]
    usual = math.fsum(known) / len(known) if known else 1.0
    speed = _speed(worker, usual)
    most = asked if worker.speed is not None else max(batch, asked // UNKNOWN_PART)
    left = free + worker.left + math.fsum(other.left for other in others)
    together = speed + math.fsum(_speed(other, usual) for other in others)
    part = PART * (left * speed / together - worker.left)
    size = int(min(most, part, free) // batch) * batch
    if size > batch:
        return size
    done_after = (worker.left + batch) / speed
    if _trained_before(done_after, free, batch, others, usual):
        return 0
    return min(batch, asked, free)


def _speed(worker: PacedWorker, usual: float) -> float:
    return max(_LEAST_SPEED, usual if worker.speed is None else worker.speed)


def _trained_before(seconds: float, free: int, batch: int, others: Collection[PacedWorker], usual: float) -> bool:
    """Whether ``others`` could train what they hold and all ``free`` items within less than ``seconds``."""
    for other in others:
        room = (_speed(other, usual) * seconds - other.left) / batch
        # Batches that end at the same time as this worker's do not count.
        free -= max(0, math.ceil(room - 1e-9) - 1) * batch
        if free <= 0:
            return True
    return False


_MOST_ITEMS = (1 << 63) - 1

_MOST_FINGERPRINT = 1 << 16
"""Characters of a fingerprint: it is in every commit of the journal."""


@dataclass(slots=True)
class _Holder:
    """One incarnation of a worker and its leases on one dataset."""

    incarnation: int
    leased: IntervalSet = field(default_factory=IntervalSet)
    #: The last request and, if it got a range, the answer: a repetition gets the same answer.
    sequence: int = 0
    granted: LeaseAnswer | None = None
    #: Not persisted: it is measured again after a restart.
    pace: Pace = field(default_factory=Pace)


class _Dataset:
    """A position of the current epoch is free, leased to one holder, or trained."""

    def __init__(self, length: int, epoch: int = 0, fingerprint: str = "") -> None:
        self.length = length
        self.epoch = epoch
        self.fingerprint = fingerprint
        self.free = IntervalSet([Span(0, length)])
        #: By rank.
        self.holders: dict[int, _Holder] = {}

    def finish_epoch(self) -> bool:
        """Begin the next epoch if nothing is free or leased; returns whether it began."""
        if self.free or any(holder.leased for holder in self.holders.values()):
            return False
        self.epoch += 1
        self.free = IntervalSet([Span(0, self.length)])
        return True

    def release(self, holder: _Holder) -> int:
        """Free all leases of ``holder``; returns the number of items."""
        count = holder.leased.positions
        for span in holder.leased:
            self.free.add(span)
        holder.leased = IntervalSet()
        return count


class DataLeases:
    """The data of a job as one state machine. Called by the driver, from its loop; does no I/O and reads no clock.

    Guarantees: a position is leased to one live worker at most; an epoch is finished once each of its items was
    reported as trained exactly once; the lowest free items go first; leases shrink at the end of an epoch, most for
    slow workers, so that all finish together. A worker that dies or leaves loses its leases at once; another worker
    trains again what it had trained and not reported. What was leased to a worker that did not hear of it becomes free
    with its next request, which says what it holds: an answer may be lost, or a request come when its repetition was
    answered. Memory is O(live workers) per dataset, and one record for an unused dataset. An event that raises has
    changed nothing.
    """

    def __init__(self) -> None:
        self._live: dict[int, int] = {}
        self._datasets: dict[str, _Dataset] = {}

    def members(self, live: Mapping[int, int]) -> StateChange[None]:
        """Set the incarnation of each live rank. The leases of all others become free."""
        self._live = dict(live)
        return StateChange(None, "; ".join(self._forget_lost()))

    def lease(self, rank: int, incarnation: int, ask: LeaseAsk, now: float = 0.0) -> StateChange[LeaseAnswer]:
        """Note what the worker has trained and what it holds, then lease it a range if it asks for one.

        ``now``: seconds of any steady clock. It gives the speed of workers, which determines the size of the range.

        Raises Fenced if the worker is not a live member or reports items that it did not lease; InvalidRequest for a
        different length of the dataset, a range outside it, or a request older than the last one.
        """
        self._check_live(rank, incarnation)
        _check_ask(ask)
        known = self._datasets.get(ask.dataset)
        data = known or _Dataset(ask.length, fingerprint=ask.fingerprint)
        if ask.fingerprint and data.fingerprint not in ("", ask.fingerprint):
            return StateChange(LeaseAnswer(epoch=data.epoch, fingerprint=data.fingerprint))
        _check_length(data, ask, rank)
        holder = data.holders.get(rank) or _Holder(incarnation)
        if ask.sequence < holder.sequence:
            raise InvalidRequest(
                f"worker {rank} asks for data of '{ask.dataset}' with an old sequence",
                expected=f"{holder.sequence} or more",
                actual=str(ask.sequence),
            )
        trained = _trained(data, holder, rank, ask)
        # Nothing raises from here on.
        self._datasets[ask.dataset], data.holders[rank] = data, holder
        before = holder.leased.positions
        for span in trained:
            holder.leased.remove(span)
        if count := before - holder.leased.positions:
            holder.pace.reported(count, now)
        reasons = [_finished(ask.dataset, data)] if data.length and trained and data.finish_epoch() else []
        if ask.sequence > holder.sequence:
            holder.sequence, holder.granted = ask.sequence, None
            if count := _free_unheard(data, holder, ask):
                reasons.append(f"{count} items of '{ask.dataset}' are free again: worker {rank} did not hear of them")
        if not ask.lease_items and (count := data.release(holder)):
            reasons.append(f"worker {rank} gives back {count} items of '{ask.dataset}'")
        return StateChange(_answer(data, holder, ask, now), "; ".join(reasons))

    @property
    def outstanding(self) -> tuple[int, int]:
        """The number of workers with a lease, counted per dataset, and of leased items."""
        held = [holder.leased.positions for data in self._datasets.values() for holder in data.holders.values()]
        return sum(map(bool, held)), sum(held)

    def persisted_state(self) -> dict[str, Any]:
        """The state as numbers, texts, lists and dicts, for a journal and ``restore``."""
        return {name: _dataset_to_plain(data) for name, data in self._datasets.items()}

    @classmethod
    def restore(cls, saved: Mapping[str, Any]) -> DataLeases:
        """Restore the leases. Call ``members`` next: until then no worker is live, and all requests are refused."""
        leases = cls()
        leases._datasets = {name: _dataset_from_plain(plain) for name, plain in saved.items()}
        return leases

    def _forget_lost(self) -> Iterator[str]:
        for name, data in self._datasets.items():
            for rank, holder in list(data.holders.items()):
                if self._live.get(rank) == holder.incarnation:
                    continue
                del data.holders[rank]
                if count := data.release(holder):
                    yield f"{count} items of '{name}' that worker {rank} held are free again"

    def _check_live(self, rank: int, incarnation: int) -> None:
        if self._live.get(rank) != incarnation:
            holder = self._live.get(rank)
            raise Fenced(
                f"worker {rank} has lost its place, and its leases on data with it",
                expected="a live worker" if holder is None else f"incarnation {holder}",
                actual=f"incarnation {incarnation}",
                remedy="start this process again; it joins as a new incarnation",
            )


def _check_ask(ask: LeaseAsk) -> None:
    if not ask.dataset or ask.sequence < 1:
        raise InvalidRequest(
            "a lease on data needs the dataset's name and a sequence from 1",
            actual=f"'{ask.dataset}', {ask.sequence}",
        )
    if ask.batch_items > ask.lease_items > 0:
        raise InvalidRequest(
            f"a lease on '{ask.dataset}' is smaller than a batch",
            expected=f"{ask.batch_items} items or more",
            actual=str(ask.lease_items),
        )
    if ask.length > _MOST_ITEMS:
        raise InvalidRequest("a dataset is too long", expected=f"{_MOST_ITEMS} at most", actual=str(ask.length))
    if len(ask.fingerprint) > _MOST_FINGERPRINT:
        raise InvalidRequest(
            f"the fingerprint of dataset '{ask.dataset}' is too long",
            expected=f"{_MOST_FINGERPRINT} characters at most",
            actual=str(len(ask.fingerprint)),
        )
    for span in (*ask.trained, *(ask.held or ())):
        if not 0 <= span.begin < span.end <= ask.length:
            raise InvalidRequest(
                f"not a range of dataset '{ask.dataset}'",
                expected=f"positions within 0 to {ask.length - 1}",
                actual=str((span.begin, span.end)),
            )


def _check_length(data: _Dataset, ask: LeaseAsk, rank: int) -> None:
    if data.length != ask.length or data.fingerprint != ask.fingerprint:
        raise InvalidRequest(
            f"worker {rank} has another dataset under the name '{ask.dataset}'",
            expected=f"{data.length} items{_kind(data.fingerprint)}, as the first worker said",
            actual=f"{ask.length} items{_kind(ask.fingerprint)}",
            remedy="give every worker the same data, or pass another name: cluster.shard(loader, name=…)",
        )


def _kind(fingerprint: str) -> str:
    return " of files" if fingerprint else ""


def _trained(data: _Dataset, holder: _Holder, rank: int, ask: LeaseAsk) -> tuple[Span, ...]:
    """The newly trained ranges in ``ask``. Raises Fenced for ranges that are neither trained nor leased to the
    worker.
    """
    if not ask.trained or ask.trained_epoch < data.epoch:
        # A repetition: the epoch ended, so all of it was reported.
        return ()
    for span in ask.trained:
        if holder.leased.covers(span) and ask.trained_epoch == data.epoch:
            continue
        # In a repetition parts of it count as trained already; no part may be leased to another worker.
        others = (other.leased for other in data.holders.values() if other is not holder)
        if ask.trained_epoch > data.epoch or any(spans.overlaps(span) for spans in (data.free, *others)):
            raise Fenced(
                f"worker {rank} reports items of '{ask.dataset}' that are not leased to it",
                expected=", ".join(map(str, holder.leased)) or "nothing",
                actual=f"{span} of epoch {ask.trained_epoch}",
                remedy="its lease was handed to another worker, or given back",
            )
    return ask.trained


def _free_unheard(data: _Dataset, holder: _Holder, ask: LeaseAsk) -> int:
    """Free what is leased to ``holder`` and not among what it says it holds; returns the number of items.

    Only a new request is believed: one that is repeated may be older than the answer to its repetition.
    """
    if ask.held is None:
        return 0
    unheard = IntervalSet(holder.leased)
    for span in ask.held if ask.trained_epoch == data.epoch else ():
        unheard.remove(span)
    for span in unheard:
        holder.leased.remove(span)
        data.free.add(span)
    return unheard.positions


def _finished(name: str, data: _Dataset) -> str:
    return f"epoch {data.epoch - 1} of '{name}' is finished: {data.length} items"


def _answer(data: _Dataset, holder: _Holder, ask: LeaseAsk, now: float) -> LeaseAnswer:
    if holder.granted is not None:
        return holder.granted
    if data.epoch > ask.epoch or not data.length:
        return LeaseAnswer(epoch=ask.epoch, done=True)
    if ask.lease_items and data.free and (items := _size(data, holder, ask, now)):
        span = data.free.take(items, ask.batch_items or 1)
        holder.pace.leased(now, had_none=not holder.leased)
        holder.leased.add(span)
        holder.granted = LeaseAnswer(span, data.epoch)
        return holder.granted
    ranks = tuple(sorted(rank for rank, other in data.holders.items() if other.leased))
    return LeaseAnswer(epoch=data.epoch, holders=ranks)


def _size(data: _Dataset, holder: _Holder, ask: LeaseAsk, now: float) -> int:
    """How many free items ``holder`` gets now."""
    if not ask.batch_items:
        return ask.lease_items
    others = (other for other in data.holders.values() if other is not holder and other.leased)
    paced = [other.pace.worker(other.leased.positions, now) for other in others]
    own = holder.pace.worker(holder.leased.positions, now)
    return lease_size(ask.lease_items, ask.batch_items, data.free.positions, own, paced)


def _dataset_to_plain(data: _Dataset) -> dict[str, Any]:
    return {
        "length": data.length,
        "epoch": data.epoch,
        "fingerprint": data.fingerprint,
        "free": _spans_to_plain(data.free),
        "holders": {
            str(rank): {
                "incarnation": holder.incarnation,
                "sequence": holder.sequence,
                "leased": _spans_to_plain(holder.leased),
                "granted": _granted_to_plain(holder.granted),
            }
            for rank, holder in data.holders.items()
        },
    }


def _dataset_from_plain(plain: Mapping[str, Any]) -> _Dataset:
    # Release 0.1.0 wrote no fingerprint.
    data = _Dataset(plain["length"], plain["epoch"], plain.get("fingerprint", ""))
    data.free = _spans_from_plain(plain["free"])
    for rank, holder in plain["holders"].items():
        data.holders[int(rank)] = _Holder(
            holder["incarnation"],
            _spans_from_plain(holder["leased"]),
            holder["sequence"],
            _granted_from_plain(holder["granted"]),
        )
    return data


def _spans_to_plain(spans: IntervalSet) -> list[list[int]]:
    return [[span.begin, span.end] for span in spans]


def _spans_from_plain(plain: list[list[int]]) -> IntervalSet:
    return IntervalSet(Span(begin, end) for begin, end in plain)


def _granted_to_plain(answer: LeaseAnswer | None) -> list[int] | None:
    return None if answer is None or answer.span is None else [answer.span.begin, answer.span.end, answer.epoch]


def _granted_from_plain(plain: list[int] | None) -> LeaseAnswer | None:
    return None if plain is None else LeaseAnswer(Span(plain[0], plain[1]), plain[2])
