"""Keeps the last request for the program that starts the workers, which polls the coordinator."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ps_protocol import times
from ps_protocol.cluster.scaling import ScaleOrder
from ps_protocol.errors import NotReady
from ps_server.coordinator.elasticity.engines.base import SHARDS, WORKERS

LAUNCHER = "launcher"
"""What ``--engine`` calls it; ``launcher:workers`` where that program can start and end workers only."""

LOST = "lost"
"""With ``launcher:`` before it: that program starts lost workers again, and no others."""


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """The workers that the coordinator requests."""

    #: From 1; rises with every request of this coordinator process. 0: no request yet.
    number: int = 0
    #: The number of workers that the job should have.
    workers: int = 0
    #: Ranks whose workers were lost.
    ranks: tuple[int, ...] = ()


class KeptRequest:
    """The engine ``launcher``. ``last`` may be read by any thread.

    The program reads the wanted size from the cluster's state; this engine only reports whether it can be reached.
    """

    by_count = False

    def __init__(self, scales: frozenset[str] = frozenset({WORKERS, SHARDS})) -> None:
        self.last = WorkerRequest()
        self.scales = scales
        #: The time of the program's last poll, of time.monotonic(); initially the present, so that it has time to
        #: begin.
        self.asked_at = time.monotonic()

    def request(self, wanted: int, ranks: tuple[int, ...]) -> str:
        """Replace the last request."""
        self.last = WorkerRequest(self.last.number + 1, wanted, ranks)
        return f"request {self.last.number}, of the program that starts them"

    def scale(self, order: ScaleOrder) -> str:
        """Does nothing: the program polls. Raises NotReady if it has not polled for a minute."""
        silent_seconds = time.monotonic() - self.asked_at
        if silent_seconds > times.PATIENCE_SECONDS:
            raise NotReady(
                "the program that started the processes of this job does not ask any more",
                expected=f"a call within {times.PATIENCE_SECONDS:g} s",
                actual=f"none for {silent_seconds:.0f} s",
                remedy="see whether ps-run or the driver with RayCluster runs, and reaches the coordinator",
            )
        return "the program that started them will read the new size"

    def describe(self) -> str:
        """The program that started the workers."""
        return "the program that starts them"
