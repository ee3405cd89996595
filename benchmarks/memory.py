"""Resident memory of a shard against what it has to hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks import ours
from benchmarks.crew import Crew
from benchmarks.rows import Key, Subject

OPERATION = "shard memory with momentum"

_MOMENTUM = 0.9
_RESET_PEAK = "5"


def subject(transport: str, nbytes: int, pushers: int) -> Subject:
    """Peak of one shard while ``pushers`` workers step at once, beside the bound.

    Bound: an idle shard, parameters and momentum times 1.1, and one gradient per pusher.
    """
    key = Key(ours.system(transport), OPERATION, nbytes, workers=pushers)

    @contextmanager
    def opened() -> Iterator[_Watched]:
        with ours.job(transport, Key(key.system, OPERATION, 4), momentum=_MOMENTUM) as (workers, shards):
            # A tiny model has made a step: everything is loaded, nothing is large.
            Crew(workers).run(ours.STEP, 1, 0)
            idle = psutil.Process(shards[0]).memory_info().rss
        with ours.job(transport, key, momentum=_MOMENTUM) as (workers, shards):
            yield _Watched(Crew(workers), shards[0], idle, key)

    return Subject((key,), opened)


class _Watched:
    """A ``Running`` whose samples are bytes."""

    def __init__(self, workers: Crew, shard: int, idle: int, key: Key) -> None:
        self._workers = workers
        self._shard = Path(f"/proc/{shard}")
        self._idle = idle
        self._bound = idle + 1.1 * 2 * key.nbytes + key.workers * key.nbytes

    def run(self, operation: str, count: int, warm_up: int) -> dict[str, list[float]]:
        """See ``Running``. The peak is the kernel's own, of ``count`` steps of every worker."""
        self._workers.run(ours.STEP, 1, warm_up)
        (self._shard / "clear_refs").write_text(_RESET_PEAK)
        self._workers.run(ours.STEP, count, 0)
        return {"peak_bytes": [self._peak()], "bound_bytes": [self._bound], "idle_bytes": [float(self._idle)]}

    def rest(self) -> None:
        """Workers keep their leases."""

    def wake(self) -> None:
        """Workers keep their leases."""

    def _peak(self) -> float:
        lines = (self._shard / "status").read_text().splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
