"""Whether communication hides behind computing: a step with ``overlap=True`` beside computing of the same length."""

from __future__ import annotations

import inspect
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
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

OPERATION, COPYING = "wait and step, overlapped", "wait and step, overlapped, gradients copied"
"""Computing is stood in for by a wait: it takes no core, as computing on an accelerator would not.

Zeroing the gradients, which training without shards has, too, is part of it; "gradients copied" has new ones.
"""


def subject(transport: str, nbytes: int) -> Subject:
    """Seconds of wait and step; beside it "compute_seconds", the wait: a plain step's time in the same round."""
    keys = tuple(Key(ours.system(transport), operation, nbytes) for operation in (OPERATION, COPYING))

    @contextmanager
    def opened() -> Iterator[_Overlapped]:
        key = keys[0]
        with ours.job(transport, key) as (plain, _), _overlapping_job(transport, key) as overlapping:
            yield _Overlapped(Crew(plain), overlapping)

    return Subject(keys, opened)


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
    """A ``Loop``: wait, then step. Used from one thread."""

    def __init__(
        self, step: Callable[[], object], zero: Callable[[], object], before: Mapping[str, Callable[[], object]]
    ) -> None:
        """``zero`` is part of the wait, but not where gradients are copied; ``before``: see ``Loop``."""
        super().__init__({OPERATION: lambda: self._wait_and_step(zero), COPYING: self._wait_and_step}, before)
        self._step = step
        self._seconds = 0.0

    def wait_for(self, seconds: float) -> None:
        """How long the wait is from now on."""
        self._seconds = seconds

    def _wait_and_step(self, zero: Callable[[], object] = lambda: None) -> None:
        ends = time.perf_counter() + self._seconds
        zero()
        time.sleep(max(0.0, ends - time.perf_counter()))
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
        own = [torch.ones_like(weight) for weight in model.weights]

        def step() -> None:
            optimizer.step()
            check()

        def keep() -> None:
            if model.weights[0].grad is None or model.weights[0].grad is own[0]:
                model.use([None] * len(own))
                model.set_gradients()

        before = {OPERATION: keep, COPYING: lambda: model.use(own)}
        yield WaitingLoop(step, lambda: optimizer.zero_grad(set_to_none=False), before)


@contextmanager
def _overlapping_job(transport: str, key: Key) -> Iterator[Child]:
    with running_cluster() as cluster, Child(worker, cluster.address, transport, key.nbytes) as child:
        child.ready()
        yield child
