"""A few workers of one tracker that number their own pushes, so that a test reads as a story."""

from __future__ import annotations

from typing import Any

from ps_protocol.model.spec import WORKERS, Consistency, Mode, StalePolicy
from ps_server.consistency import Position, PushDecision, PushInfo, Tracker, WorkerKey

ASYNC = Consistency(Mode.ASYNC)
SYNC = Consistency(Mode.SYNC)


def ssp(bound: int) -> Consistency:
    return Consistency(Mode.SSP, staleness=bound)


def backup(workers: int, grace_seconds: float = 0.0) -> Consistency:
    return Consistency(Mode.SYNC, backup=workers, grace_seconds=grace_seconds)


def stale(policy: StalePolicy, threshold: Any) -> Consistency:
    by_workers = threshold == WORKERS
    return Consistency(stale_policy=policy, stale_threshold=0 if by_workers else threshold, stale_by_workers=by_workers)


def at(clock: int, phase: int = 0) -> Position:
    return Position(phase, clock)


class Job:
    """Ranks 0 … n−1 with incarnations 1 … n, all listed before the first push."""

    def __init__(self, consistency: Consistency, workers: int = 2) -> None:
        self.tracker = Tracker(consistency)
        self.live = {rank: rank + 1 for rank in range(workers)}
        self.tracker.members(self.live)
        self._sequences: dict[WorkerKey, int] = {}
        #: Seconds since some moment.
        self.now = 0.0

    def key(self, rank: int) -> WorkerKey:
        return WorkerKey(rank, self.live[rank])

    def join(self, rank: int, incarnation: int, phase: int = 0) -> Position:
        self.live[rank] = incarnation
        self.tracker.members(self.live)
        return self.tracker.attach(self.key(rank), phase)

    def leave(self, rank: int) -> None:
        del self.live[rank]
        self.tracker.members(self.live)

    def info(self, rank: int, clock: int, phase: int = 0, pulled: int = 0, skipped: bool = False) -> PushInfo:
        key = self.key(rank)
        self._sequences[key] = self._sequences.get(key, 0) + 1
        return PushInfo(key, self._sequences[key], Position(phase, clock), pulled, skipped)

    def push(self, rank: int, clock: int, phase: int = 0, pulled: int = 0, skipped: bool = False) -> PushDecision:
        return self.tracker.push(self.info(rank, clock, phase, pulled, skipped))

    def rounds(self) -> list[tuple[Position, list[int]]]:
        """What is ready: position and ranks of each round."""
        return [(r.position, [push.worker.rank for push in r.contributions]) for r in self.tracker.take_ready(self.now)]

    def position(self, rank: int) -> Position:
        return next(s.position for s in self.tracker.clocks() if s.worker.rank == rank)
