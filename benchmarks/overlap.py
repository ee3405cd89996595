"""Whether communication hides behind computing: a step with ``overlap=True`` beside computing of the same length."""

from __future__ import annotations

import inspect
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import ps_worker
from benchmarks import ours
from benchmarks.cluster import running_cluster
from benchmarks.crew import Crew
from benchmarks.processes import Child
from benchmarks.rows import Key, Subject
from benchmarks.timing import Loop

OPERATION = "wait and step, overlapped"
"""Computing is stood in for by a wait: it takes no core, as computing on an accelerator would not."""


def subject(transport: str, nbytes: int) -> Subject:
    """Seconds of wait and step; beside it "compute_seconds", the wait: a plain step's time in the same round."""
    key = Key(ours.system(transport), OPERATION, nbytes)

    @contextmanager
    def opened() -> Iterator[_Overlapped]:
        with ours.job(transport, key) as (plain, _), _overlapping_job(transport, key) as overlapping:
            yield _Overlapped(Crew(plain), overlapping)

    return Subject((key,), opened)


def exists() -> bool:
    """Whether this version of the SDK overlaps."""
    return "overlap" in inspect.signature(ps_worker.Cluster.optimizer).parameters


class _Overlapped:
    """A ``Running``: a plain job gives the length of the wait, the overlapping one is timed."""

    def __init__(self, plain: Crew, worker: Child) -> None:
        self._plain = plain
        self._worker = worker

    def run(self, operation: str, count: int, warm_up: int) -> dict[str, list[float]]:
        """See ``Running``."""
        wait = statistics.median(self._plain.run(ours.STEP, count, warm_up)["seconds"])
        self._worker.call("wait_for", wait)
        return {"seconds": self._worker.call("run", operation, count, warm_up + 1), "compute_seconds": [wait]}

    def rest(self) -> None:
        """Both keep their leases."""

    def wake(self) -> None:
        """Both keep their leases."""


class WaitingLoop(Loop):
    """A ``Loop`` of one operation: wait, then step. Used from one thread."""

    def __init__(self, step: Callable[[], object]) -> None:
        super().__init__({OPERATION: self._wait_and_step})
        self._step = step
        self._seconds = 0.0

    def wait_for(self, seconds: float) -> None:
        """How long the wait is from now on."""
        self._seconds = seconds

    def _wait_and_step(self) -> None:
        time.sleep(self._seconds)
        self._step()


@contextmanager
def worker(address: str, transport: str, nbytes: int) -> Iterator[Loop]:
    """The role of the process that is timed."""
    # The copies of a step may use the cores that the computing, which is elsewhere, leaves free.
    torch.set_num_threads(os.cpu_count() or 1)
    with ours.connected(address, 0, transport) as connection, ours.undisturbed() as check:
        model = ours.Flat(nbytes, 1)
        overlap: dict[str, Any] = {"overlap": True}
        optimizer = connection.optimizer(torch.optim.SGD, model, lr=1e-6, **overlap)
        model.set_gradients()

        def step() -> None:
            optimizer.step()
            check()

        yield WaitingLoop(step)


@contextmanager
def _overlapping_job(transport: str, key: Key) -> Iterator[Child]:
    with running_cluster() as cluster, Child(worker, cluster.address, transport, key.nbytes) as child:
        child.ready()
        yield child
