"""Workers of given speeds that train the items of one dataset, in virtual time, as LeaseFeed and LeasedLoader do."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ps_protocol.cluster.leases import LeaseAsk, Span
from ps_server.coordinator.data_leases import DataLeases

AGAIN_SECONDS = 5.0
"""A worker that gets nothing asks again after this time, or when an epoch ends."""


@dataclass
class RaceWorker:
    rank: int
    #: Of one batch.
    step_seconds: float
    #: Batches that its DataLoader samples ahead.
    ahead: int = 0
    epoch: int = 0
    sequence: int = 0
    ready: deque[Span] = field(default_factory=deque)
    sampled: deque[Span] = field(default_factory=deque)
    current: Span = field(default_factory=lambda: Span(0, 0))
    unreported: list[Span] = field(default_factory=list)
    #: It got nothing at its last request.
    stalled: bool = False
    #: When it finished its last batch of each epoch.
    finished: dict[int, float] = field(default_factory=dict)
    items: int = 0
    training: bool = False


class LeaseRace:
    """One job. ``run`` trains epochs of ``batches`` whole batches."""

    def __init__(self, workers: Sequence[RaceWorker], batches: int, lease: int, batch: int = 4, seed: int = 0) -> None:
        """``lease``: the most batches that a worker asks for."""
        self.leases, self.length, self.batch = DataLeases(), batches * batch, batch
        self.lease_items = lease * batch
        self.workers = list(workers)
        self.random = random.Random(seed)
        #: Steps take up to this part more or less than usual.
        self.jitter = 0.0
        self.now = 0.0
        self._events: list[tuple[float, int, str]] = []
        self.leases.members({worker.rank: 100 + worker.rank for worker in workers})
        self.ended: dict[int, float] = {}

    def run(self, epochs: int = 1) -> None:
        for worker in self.workers:
            self._push(0.0, worker, "ask")
        while len(self.ended) < epochs:
            assert self._events, "every worker waits, and none trains"
            self.now, rank, what = heapq.heappop(self._events)
            worker = self.workers[rank]
            if worker.epoch >= epochs:
                continue
            if what == "trained":
                worker.training = False
                done = worker.sampled.popleft()
                worker.unreported.append(done)
                worker.items += len(done)
                worker.finished[worker.epoch] = self.now
            self._go_on(worker)

    def _go_on(self, worker: RaceWorker) -> None:
        while len(worker.sampled) <= worker.ahead:
            if not len(worker.current):
                if not worker.ready and not worker.stalled:
                    self._ask(worker)
                if not worker.ready:
                    break
                worker.current = worker.ready.popleft()
                if not worker.stalled:
                    self._ask(worker)
            end = min(worker.current.end, worker.current.begin + self.batch)
            worker.sampled.append(Span(worker.current.begin, end))
            worker.current = Span(end, worker.current.end)
        if worker.training:
            return
        if worker.sampled:
            worker.training = True
            part = 1.0 + self.jitter * self.random.uniform(-1.0, 1.0)
            self._push(self.now + worker.step_seconds * part, worker, "trained")
        elif self._ask(worker):
            self._go_on(worker)
        elif worker.stalled:
            self._push(self.now + AGAIN_SECONDS, worker, "ask")

    def _ask(self, worker: RaceWorker) -> bool:
        """Whether it may go on: it has got a lease, or begins its next epoch."""
        worker.sequence += 1
        trained, worker.unreported = tuple(worker.unreported), []
        ask = LeaseAsk(
            "data", self.length, worker.epoch, self.lease_items, worker.sequence, trained, worker.epoch, self.batch
        )
        decision = self.leases.lease(worker.rank, 100 + worker.rank, ask, self.now)
        if decision.reason:
            self.ended.setdefault(worker.epoch, self.now)
            for other in self.workers:
                if other is not worker:
                    self._push(self.now, other, "ask")
        answer = decision.value
        worker.stalled = answer.span is None
        if answer.span is not None:
            worker.ready.append(answer.span)
        if answer.done:
            worker.epoch += 1
            worker.stalled = False
        return not worker.stalled

    def _push(self, at: float, worker: RaceWorker, what: str) -> None:
        heapq.heappush(self._events, (at, worker.rank, what))
