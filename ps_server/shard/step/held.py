"""Pushes of one model that are accepted and wait for the others of their step (sync)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from ps_server.consistency import Position, Round, WorkerKey
from ps_server.shard.counters import StepTimes
from ps_server.shard.step.push import IncomingPush


class HeldPushes(Mapping[tuple[WorkerKey, int], IncomingPush]):
    """By worker and sequence; knows how long each step has been open."""

    def __init__(self) -> None:
        self._pushes: dict[tuple[WorkerKey, int], IncomingPush] = {}
        #: When the first push of each open step came.
        self._began: dict[Position, float] = {}

    def __getitem__(self, key: tuple[WorkerKey, int]) -> IncomingPush:
        return self._pushes[key]

    def __iter__(self) -> Iterator[tuple[WorkerKey, int]]:
        return iter(self._pushes)

    def __len__(self) -> int:
        return len(self._pushes)

    def hold(self, push: IncomingPush) -> None:
        """Keep ``push`` until its step is taken."""
        self._pushes[push.info.worker, push.info.sequence] = push
        self._began.setdefault(push.info.position, time.perf_counter())

    def take(self, ready: Round, times: StepTimes) -> list[IncomingPush]:
        """The pushes of a step that ends; how long it was open is counted in ``times``."""
        if began := self._began.pop(ready.position, None):
            times.round.observe(time.perf_counter() - began)
        return [self._pushes.pop((info.worker, info.sequence)) for info in ready.contributions]

    def take_all(self) -> list[IncomingPush]:
        """The pushes of all steps, which will not end here."""
        pushes = list(self._pushes.values())
        self._pushes.clear()
        self._began.clear()
        return pushes
