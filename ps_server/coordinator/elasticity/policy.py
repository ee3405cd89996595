"""Decides when a worker counts as slow, a shard as hot, and when workers are requested. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Generic, TypeVar

from ps_protocol.retry import WORKERS
from ps_server.coordinator import times
from ps_server.coordinator.elasticity.decisions import AskForWorkers, Decision, JobLook, Relieve
from ps_server.settings import setting

K = TypeVar("K", bound=Hashable)


class Debounce(Generic[K]):
    """A state for each key, debounced: it changes once its condition has lasted. Times rise, in seconds."""

    def __init__(self, seconds: float, part: float = 0.0, longest_seconds: float = 0.0) -> None:
        """``seconds``: how long a condition has to last, and its end, before the state changes.

        ``part``: at least this part of the time that the state has lasted, but at most ``longest_seconds``, so that
        occasional noise does not change it.
        """
        self._seconds = seconds
        self._part, self._longest = part, longest_seconds
        self._on: set[K] = set()
        #: By key, the time of the last change.
        self._entered: dict[K, float] = {}
        #: By key, since when the condition calls for a change.
        self._since: dict[K, float] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._on

    def forget(self, keys: Collection[K]) -> None:
        """Keep only these."""
        self._on &= set(keys)
        self._since = {key: since for key, since in self._since.items() if key in keys}
        self._entered = {key: since for key, since in self._entered.items() if key in keys}

    def changed(self, key: K, *, on: bool, off: bool, now: float) -> bool:
        """Whether the state of ``key`` changes now. ``on``: the condition holds; ``off``: it is over for certain.

        If neither is true, the state stays.
        """
        entered = self._entered.setdefault(key, now)
        if not (off if key in self._on else on):
            self._since.pop(key, None)
            return False
        since = self._since.setdefault(key, now)
        if now - since < max(self._seconds, min(self._part * (since - entered), self._longest)):
            return False
        del self._since[key]
        self._on ^= {key}
        self._entered[key] = now
        return True


HOT, NOT_HOT = 1.5, 1.2
"""Times the mean traffic, or the mean queue: a shard above the first is hot by it, until it is below the second."""

HOLD_PART = 1 / 60
"""A shard is hot, or not any more, once it has been so for ``times.HOLD_SECONDS``, and for this part of the time
before, ``times.LONGEST_HOLD_SECONDS`` at most. Noise that crosses a bound now and then does so in the first hour, or
does not count any more."""

LEAST_TRAFFIC = 1e6
"""Bytes per second below which the traffic of a shard is no reason."""

LEAST_QUEUE = 0.5
"""Pushes that wait, on average, below which the queue of a shard is no reason."""

QUEUE_PART = 0.1
"""Of what it holds a shard gives so much for its queue: how its queue depends on what it holds is not known."""


USELESS = 0.9
"""A move that leaves more than this part of the excess was of no use: that shard is left alone until it cools down."""

MOVES_PER_HOUR = 6


class _Measure:
    """One measure of load, traffic or queues, and the shards that are hot by it. Changed by HotShards."""

    def __init__(self, least: float, useless: str) -> None:
        """``least``: no shard below it is hot. ``useless``: the text for a move that did not help."""
        self.least, self.useless = least, useless
        self.hot: Debounce[int] = Debounce(times.HOLD_SECONDS, HOLD_PART, times.LONGEST_HOLD_SECONDS)
        #: Hot shards that moves do not relieve.
        self.left_alone: set[int] = set()

    def judge(self, values: Mapping[int, float], seen: Callable[[int], str], now: float) -> Iterator[Decision]:
        """The shards that have become hot by this measure, or have cooled down. ``seen``: the numbers of a shard."""
        mean = fmean(values.values())
        for shard, value in sorted(values.items(), key=lambda each: (-each[1], each[0])):
            on, off = value > max(HOT * mean, self.least), value < self._calm_below(mean)
            if self.hot.changed(shard, on=on, off=off, now=now):
                if shard in self.hot:
                    yield Decision(f"shard {shard} is hot: {seen(shard)}", warning=True)
                else:
                    self.left_alone.discard(shard)
                    yield Decision(f"shard {shard} is not hot any more: {seen(shard)}")

    def forget(self, shards: Collection[int]) -> None:
        """Keep only these."""
        self.hot.forget(shards)
        self.left_alone &= set(shards)

    def may_give(self, shard: int, value: float, mean: float) -> bool:
        """Whether ``shard`` is hot by this measure and moves may help."""
        return shard in self.hot and shard not in self.left_alone and value > self._calm_below(mean)

    def _calm_below(self, mean: float) -> float:
        return max(NOT_HOT * mean, NOT_HOT / HOT * self.least)


class HotShards:
    """Part of ElasticPolicy, which calls it with rising times in seconds while the job trains."""

    def __init__(self, *, rebalance: bool) -> None:
        """``rebalance``: whether to relieve hot shards by moves."""
        self._rebalance = rebalance
        self._traffic = _Measure(LEAST_TRAFFIC, "lower its traffic")
        self._queue = _Measure(LEAST_QUEUE, "shorten its queue")
        #: Times of the last moves.
        self._moves: deque[float] = deque(maxlen=MOVES_PER_HOUR)
        #: By source and target shard: the time of the last move.
        self._given: dict[tuple[int, int], float] = {}
        #: The last move: its measure, its source, and how far the source was above the mean, or how many pushes waited.
        self._moved: tuple[_Measure, int, float] | None = None
        self._judge_from = float("-inf")

    def decide(self, look: JobLook, now: float) -> Iterator[Decision]:
        """Decide from the traffic and the queues of ``look``."""
        for measure in (self._traffic, self._queue):
            measure.forget(look.traffic)
        self._given = {
            pair: at
            for pair, at in self._given.items()
            if now - at < times.GIVEN_SECONDS and look.traffic.keys() >= {*pair}
        }
        if look.moving:
            self._judge_from = now + times.SETTLE_SECONDS
        if now < self._judge_from or len(look.traffic) < 2:
            return
        queues = {shard: look.queued_pushes.get(shard, 0.0) for shard in look.traffic}
        mean, queue_mean = fmean(look.traffic.values()), fmean(queues.values())

        def traffic_seen(shard: int) -> str:
            return f"{look.traffic[shard] / 1e6:.1f} MB/s, the mean is {mean / 1e6:.1f}"

        def queue_seen(shard: int) -> str:
            nbytes = look.queued_bytes.get(shard, 0.0)
            return f"{queues[shard]:.1f} pushes ({nbytes / 1e6:.1f} MB) wait, the mean is {queue_mean:.1f}"

        yield from self._traffic.judge(look.traffic, traffic_seen, now)
        yield from self._queue.judge(queues, queue_seen, now)
        if self._rebalance:
            yield from self._for_traffic(look.traffic, mean, now)
        if self._rebalance and now >= self._judge_from:
            yield from self._for_queue(look.traffic, mean, queues, queue_mean, now)

    def _for_traffic(self, traffic: Mapping[int, float], mean: float, now: float) -> Iterator[Decision]:
        hottest = max(traffic, key=lambda shard: (traffic[shard], -shard))
        if not self._traffic.may_give(hottest, traffic[hottest], mean):
            return
        takers = [shard for shard in self._takers(hottest, traffic) if traffic[shard] < mean]
        if not takers:
            yield from self._leave_alone(self._traffic, hottest)
            return
        to = min(takers, key=lambda shard: (shard in self._queue.hot, traffic[shard], shard))
        # As much as takes neither shard across the mean.
        part = min(traffic[hottest] - mean, mean - traffic[to]) / traffic[hottest]
        seen = f"{traffic[hottest] / 1e6:.1f} MB/s, {traffic[to] / 1e6:.1f} there"
        yield from self._move(self._traffic, hottest, traffic[hottest] / mean - 1.0, to, part, seen, now)

    def _for_queue(
        self, traffic: Mapping[int, float], mean: float, queues: Mapping[int, float], queue_mean: float, now: float
    ) -> Iterator[Decision]:
        slowest = max(traffic, key=lambda shard: (queues[shard], -shard))
        if not self._queue.may_give(slowest, queues[slowest], queue_mean) or not traffic[slowest]:
            return
        takers = [shard for shard in self._takers(slowest, traffic) if queues[shard] < queue_mean]
        if not takers:
            yield from self._leave_alone(self._queue, slowest)
            return
        to = min(takers, key=lambda shard: (queues[shard], traffic[shard], shard))
        # Never so much that the target becomes hot: it would pass the load on.
        room = NOT_HOT * mean - traffic[to]
        if room > 0.0:
            part = min(QUEUE_PART, room / traffic[slowest])
            seen = f"{queues[slowest]:.1f} pushes wait, {queues[to]:.1f} there"
            yield from self._move(self._queue, slowest, queues[slowest], to, part, seen, now)

    def _takers(self, shard: int, shards: Iterable[int]) -> list[int]:
        """Those of ``shards`` from which nothing moved to ``shard``, directly or through other shards."""
        sources, found = {shard}, {shard}
        while found:
            found = {giver for giver, taker in self._given if taker in found} - sources
            sources |= found
        return [each for each in shards if each not in sources]

    def _leave_alone(self, measure: _Measure, shard: int) -> Iterator[Decision]:
        """A move back would be followed by the same move again."""
        measure.left_alone.add(shard)
        yield Decision(f"shard {shard} is left alone: it took slices of all that have less", warning=True)

    def _move(
        self, measure: _Measure, shard: int, excess: float, to: int, part: float, seen: str, now: float
    ) -> Iterator[Decision]:
        """A move, unless there were too many, or the last move off this shard by this measure did not help."""
        if self._moved is not None and self._moved[:2] == (measure, shard) and excess > USELESS * self._moved[2]:
            measure.left_alone.add(shard)
            self._moved = None
            yield Decision(f"shard {shard} is left alone: moving slices did not {measure.useless}", warning=True)
            return
        if len(self._moves) == MOVES_PER_HOUR and now - self._moves[0] < 3600.0:
            return
        self._moves.append(now)
        self._given[shard, to] = now
        self._moved, self._judge_from = (measure, shard, excess), now + times.SETTLE_SECONDS
        yield Relieve(f"{part:.0%} of shard {shard} moves to shard {to}: {seen}", shard=shard, to=to, part=part)


SLOW, NOT_SLOW = 0.5, 0.7
"""Of the median speed of the others: a worker below the first is slow, until it is above the second."""

MOST_NAMED = 8
"""So many workers that become slow at the same look are named one by one; of more, there is one decision."""


def median_without(ordered: Sequence[float], value: float) -> float:
    """The median of ascending numbers without one that equals ``value``; 0 if there are no others."""
    at, rest = bisect_left(ordered, value), len(ordered) - 1
    if rest < 1:
        return 0.0
    low, high = (rest - 1) // 2, rest // 2
    return (ordered[low + (low >= at)] + ordered[high + (high >= at)]) / 2


def _of_slow(workers: Sequence[tuple[int, str]], *, slow: bool) -> Iterator[Decision]:
    """The decisions about workers, each with its numbers, that have become slow or are no longer slow."""
    end = "; its share of leased data shrinks" if slow else ""
    what = "slow" if slow else "not slow any more"
    if len(workers) <= MOST_NAMED:
        for rank, numbers in workers:
            yield Decision(f"worker {rank} is {what}: {numbers}{end}", warning=slow)
        return
    ranks = ", ".join(str(rank) for rank, _ in workers[:MOST_NAMED])
    yield Decision(f"{len(workers)} workers are {what}: {ranks} and others", warning=slow)


@dataclass(frozen=True, slots=True)
class ElasticSettings:
    """The actions that the policy may take besides reporting."""

    rebalance: bool = setting(
        False,
        "Move slices and rows by itself from a shard that has 1.5 times the mean traffic for 30 s to the one that has "
        "least: 6 times an hour at most, and no more where it does not help.",
    )
    #: The number of workers to request from an engine; 0: no engine.
    workers: int = 0


class ElasticPolicy:
    """Called by the runner with rising times in seconds. Each decision is made once, and reported again when it is
    over.

    Limits: a condition counts once it has lasted ``times.HOLD_SECONDS``; between the two bounds of a pair nothing
    changes. There are pauses between moves, a limit per hour, and no more moves if they do not help. Pauses between
    requests for workers double.
    """

    def __init__(self, settings: ElasticSettings) -> None:
        self._settings = settings
        self._slow: Debounce[int] = Debounce(times.HOLD_SECONDS)
        self._shards = HotShards(rebalance=settings.rebalance)
        self._missing: Debounce[str] = Debounce(times.HOLD_SECONDS)
        self._pause_seconds = 0.0
        self._ask_from = float("-inf")

    def decide(self, look: JobLook, now: float) -> tuple[Decision, ...]:
        """Decide from ``look``: nothing for a job that does not train, unless it waits for lost workers."""
        if not look.training:
            return tuple(self._requests(look, now)) if look.waiting else ()
        return (*self._workers(look, now), *self._shards.decide(look, now), *self._requests(look, now))

    def _workers(self, look: JobLook, now: float) -> Iterator[Decision]:
        self._slow.forget(look.speeds)
        ordered = sorted(look.speeds.values())
        told: dict[bool, list[tuple[int, str]]] = {True: [], False: []}
        for rank, speed in sorted(look.speeds.items()):
            usual = median_without(ordered, speed)
            if self._slow.changed(rank, on=speed < SLOW * usual, off=speed > NOT_SLOW * usual, now=now):
                told[rank in self._slow].append((rank, f"{speed:.1f} steps/s, the others {usual:.1f}"))
        for slow, workers in told.items():
            yield from _of_slow(workers, slow=slow)

    def _requests(self, look: JobLook, now: float) -> Iterator[Decision]:
        wanted = max(0, self._settings.workers - look.left) if look.wanted is None else look.wanted
        missing = wanted - len(look.speeds)
        if self._missing.changed("workers", on=missing > 0, off=missing <= 0, now=now):
            self._ask_from, self._pause_seconds = now, 0.0
            if "workers" not in self._missing:
                yield Decision(f"all {wanted} workers are there again")
        if "workers" not in self._missing or missing <= 0 or now < self._ask_from:
            return
        self._pause_seconds = WORKERS.after(self._pause_seconds)
        self._ask_from = now + self._pause_seconds
        ranks = tuple(sorted(look.lost))
        named = f", lost: {', '.join(map(str, ranks))}" if ranks else ""
        yield AskForWorkers(
            f"{len(look.speeds)} of {wanted} workers are there{named}", warning=True, wanted=wanted, ranks=ranks
        )
