"""Children that are measured as one system: a server where there is one, and the workers that are timed."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from typing import Any, Protocol

_LIBC = ctypes.CDLL(None)

WARM_UP_SHARE = 0.2
"""Of the time that a crowd is measured, it runs before that untimed."""

BEGIN_SECONDS = 0.03
"""Until then all workers of a crowd have been told to run."""


class Worker(Protocol):
    """A process that holds a ``Loop``: a ``Child``, or a program of another interpreter."""

    pid: int

    def begin(self, method: str, *arguments: Any) -> None:
        """Start ``method`` of its loop."""

    def answer(self) -> Any:
        """What the method begun last returned. Raises ChildFailed."""


class Resting(Protocol):
    """A process that may be stopped while others are measured."""

    def rest(self) -> None:
        """Stop it."""

    def wake(self) -> None:
        """Let it go on."""


class Crew:
    """A ``Running`` made of children. ``workers`` hold a ``Loop`` each and run at the same time.

    One worker: a sample is the time of one operation. Several: one sample per visit, the time that passed by the
    operations of all of them. ``servers`` are watched for the CPU time they take.
    """

    def __init__(
        self, workers: Sequence[Worker], servers: Sequence[int] = (), *, rests: Sequence[Resting] = ()
    ) -> None:
        self._workers = workers
        self._servers = [_cpu_clock(pid) for pid in servers]
        self._rests = rests

    def run(self, operation: str, count: int, warm_up: int) -> dict[str, list[float]]:
        """See ``Running``. Raises ChildFailed."""
        if warm_up:
            self._all("run", operation, 0, warm_up)
        cpu, begin = _cpu(self._servers), time.perf_counter()
        seconds = self._all("run", operation, count, 0)
        passed, workers = time.perf_counter() - begin, len(self._workers)
        samples = {"seconds": seconds[0] if workers == 1 else [passed / (count * workers)]}
        if self._servers:
            samples["server_cpu_seconds"] = [(_cpu(self._servers) - cpu) / (count * workers)]
        return samples

    def rest(self) -> None:
        """Stop what may be stopped."""
        for child in self._rests:
            child.rest()

    def wake(self) -> None:
        """Let it go on."""
        for child in self._rests:
            child.wake()

    def _all(self, method: str, *arguments: Any) -> list[list[float]]:
        for worker in self._workers:
            worker.begin(method, *arguments)
        return [worker.answer() for worker in self._workers]


class Crowd(Crew):
    """Workers that all run for the same ``seconds``, however many operations that are.

    ``count`` and ``warm_up`` of a visit do not matter.
    A sample per visit: "seconds" by the operations of all, "server_cpu_seconds" and "worker_cpu_seconds" per operation,
    and "least_share", the fewest operations of a worker by the most of one. "step_seconds" has every operation.
    ``beside``: what all but the first worker run, for as long; only the first one's operations count.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        servers: Sequence[int],
        seconds: float,
        *,
        rests: Sequence[Resting] = (),
        beside: str = "",
    ) -> None:
        super().__init__(workers, servers, rests=rests)
        self._seconds = seconds
        self._beside = beside
        self._own = [_cpu_clock(worker.pid) for worker in (workers[:1] if beside else workers)]

    def run(self, operation: str, count: int, warm_up: int) -> dict[str, list[float]]:
        """See ``Running``. Raises ChildFailed."""
        self._for(operation, self._seconds * WARM_UP_SHARE)
        servers, own = _cpu(self._servers), _cpu(self._own)
        taken = self._for(operation, self._seconds)
        servers, own = _cpu(self._servers) - servers, _cpu(self._own) - own
        counts = [len(each) for each in taken]
        samples = {
            "seconds": [1 / sum(len(each) / sum(each) for each in taken)],
            "step_seconds": [second for each in taken for second in each],
            "worker_cpu_seconds": [own / sum(counts)],
            "least_share": [min(counts) / max(counts)],
        }
        if not self._beside:
            samples["server_cpu_seconds"] = [servers / sum(counts)]
        return samples

    def _for(self, operation: str, seconds: float) -> list[list[float]]:
        first = time.perf_counter() + BEGIN_SECONDS
        for number, worker in enumerate(self._workers):
            chosen = self._beside if self._beside and number else operation
            worker.begin("run_between", chosen, first, first + seconds)
        answers = [worker.answer() for worker in self._workers]
        return answers[:1] if self._beside else answers


def _cpu(clocks: Sequence[int]) -> float:
    return sum(map(time.clock_gettime, clocks))


def _cpu_clock(pid: int) -> int:
    """The clock of a process's CPU time; it counts nanoseconds, where /proc counts ticks of 10 ms."""
    clock = ctypes.c_int()
    if error := _LIBC.clock_getcpuclockid(pid, ctypes.byref(clock)):
        raise OSError(error, os.strerror(error))
    return clock.value
