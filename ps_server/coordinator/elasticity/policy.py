"""Decides when a worker counts as slow, and when workers are asked for; with ``hot_shards`` all of the policy: pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ps_protocol.retry import WORKERS
from ps_server.coordinator import times
from ps_server.coordinator.elasticity.decisions import AskForWorkers, Decision, JobLook
from ps_server.coordinator.elasticity.holding import Holding
from ps_server.coordinator.elasticity.hot_shards import HotShards
from ps_server.settings import setting

SLOW, NOT_SLOW = 0.5, 0.7
"""Of the median speed of the others: a worker below the first is slow, until it is above the second."""

MOST_NAMED = 8
"""So many workers that become slow at the same look are told one by one; of more, there is one decision."""


def median_without(ordered: Sequence[float], value: float) -> float:
    """The median of all but one that is equal to ``value``, of numbers in their order; 0 without others."""
    at, rest = bisect_left(ordered, value), len(ordered) - 1
    if rest < 1:
        return 0.0
    low, high = (rest - 1) // 2, rest // 2
    return (ordered[low + (low >= at)] + ordered[high + (high >= at)]) / 2


def _of_slow(workers: Sequence[tuple[int, str]], *, slow: bool) -> Iterator[Decision]:
    """What is told of workers, each with its numbers, that have become slow, or are slow no more."""
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
    """What the policy may do besides reporting."""

    rebalance: bool = setting(
        False,
        "Move slices and rows by itself from a shard that has 1.5 times the mean traffic for 30 s to the one that has "
        "least: 6 times an hour at most, and no more where it does not help.",
    )
    #: Workers that the job is to have, by asking an engine; 0: none is asked.
    workers: int = 0


class ElasticPolicy:
    """Called by the runner with rising times in seconds. Everything it decides is told once, and told when it is over.

    Limits: nothing is judged before it has lasted for ``times.HOLD_SECONDS``; between the bounds of each pair nothing
    changes. Moves come with pauses, so many an hour at most, and stop where they do not help. Requests for workers
    come with doubling pauses.
    """

    def __init__(self, settings: ElasticSettings) -> None:
        self._settings = settings
        self._slow: Holding[int] = Holding(times.HOLD_SECONDS)
        self._shards = HotShards(rebalance=settings.rebalance)
        self._missing: Holding[str] = Holding(times.HOLD_SECONDS)
        self._pause_seconds = 0.0
        self._ask_from = float("-inf")

    def decide(self, look: JobLook, now: float) -> tuple[Decision, ...]:
        """What follows from ``look``: nothing of a job that does not train, unless it waits for lost workers."""
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
