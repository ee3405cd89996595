"""Children that are measured as one system: a server where there is one, and the workers that are timed."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence

from benchmarks.processes import Child

_LIBC = ctypes.CDLL(None)


class Crew:
    """A ``Running`` made of children. ``workers`` hold a ``Loop`` each and run at the same time.

    One worker: a sample is the time of one operation. Several: one sample per visit, the time that passed by the
    operations of all of them. ``servers`` are watched for the CPU time they take.
    """

    def __init__(
        self, workers: Sequence[Child], servers: Sequence[int] = (), *, rests: Sequence[Child] = (), timed: int = 0
    ) -> None:
        self._workers = workers
        self._servers = [_cpu_clock(pid) for pid in servers]
        self._rests = rests
        #: Of how many workers the operations are counted; 0: of all.
        self._timed = timed or len(workers)

    def run(self, operation: str, count: int, warm_up: int) -> dict[str, list[float]]:
        """See ``Running``. Raises ChildFailed."""
        if warm_up:
            self._all(operation, 0, warm_up)
        cpu, begin = self._cpu(), time.perf_counter()
        seconds = self._all(operation, count, 0)
        passed = time.perf_counter() - begin
        samples = {"seconds": seconds[0] if self._timed == 1 else [passed / (count * self._timed)]}
        if self._servers:
            samples["server_cpu_seconds"] = [(self._cpu() - cpu) / (count * self._timed)]
        return samples

    def rest(self) -> None:
        """Stop what may be stopped."""
        for child in self._rests:
            child.rest()

    def wake(self) -> None:
        """Let it go on."""
        for child in self._rests:
            child.wake()

    def _all(self, operation: str, count: int, warm_up: int) -> list[list[float]]:
        for worker in self._workers:
            worker.begin("run", operation, count, warm_up)
        return [worker.answer() for worker in self._workers]

    def _cpu(self) -> float:
        return sum(map(time.clock_gettime, self._servers))


def _cpu_clock(pid: int) -> int:
    """The clock of a process's CPU time; it counts nanoseconds, where /proc counts ticks of 10 ms."""
    clock = ctypes.c_int()
    if error := _LIBC.clock_getcpuclockid(pid, ctypes.byref(clock)):
        raise OSError(error, os.strerror(error))
    return clock.value
