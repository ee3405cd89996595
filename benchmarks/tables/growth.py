"""Many new rows: how fast they come, how long another worker's look-ups wait meanwhile, and what a row takes."""

from __future__ import annotations

import mmap
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import psutil
import torch

from benchmarks import ours
from benchmarks.cluster import running_cluster
from benchmarks.crew import Crew
from benchmarks.processes import Child
from benchmarks.rows import Key, Subject
from benchmarks.tables.ids import DIM, scattered
from benchmarks.tables.rates import MILLION, give_gradients, optimizer_of
from benchmarks.timing import Loop
from ps_worker import rows
from ps_worker.tables import Embedding

OPERATION, MEMORY = "rows inserted, row-wise Adagrad", "new memory for rows"

ASKED_WAIT_SECONDS = 0.05
"""No look-up of another worker may wait longer."""

ASKED_ROW_BYTES = 1.25 * (4 * DIM + 4 + 8)
"""What a row may take: values, state and id, and a quarter more."""

AT_ONCE, MANY_AT_ONCE = 20_000, 100_000
"""Ids of one push. Others wait for a push."""

_WATCHED = 1_000
_PAUSE_SECONDS = 0.005


def key(transport: str, inserted: int, at_once: int = AT_ONCE) -> Key:
    """The row of so many insertions."""
    operation = OPERATION if at_once == AT_ONCE else f"{OPERATION}, {at_once:,} a push"
    return Key(ours.system(transport), operation, 0, workers=2, rows=inserted)


def subject(transport: str, inserted: int, at_once: int = AT_ONCE) -> Subject:
    """Seconds of the pushes that insert rows, another worker's waits meanwhile, and the memory the shard took."""

    @contextmanager
    def opened() -> Iterator[Growing]:
        with ExitStack() as stack:
            cluster = stack.enter_context(running_cluster(workers=2))
            grower = stack.enter_context(Child(worker, 0, cluster.address, transport))
            watcher = stack.enter_context(Child(worker, 1, cluster.address, transport))
            grower.ready()
            watcher.ready()
            yield Growing(grower, watcher, psutil.Process(cluster.shards[0]), inserted, at_once)

    return Subject((key(transport, inserted, at_once),), opened)


def memory_key(inserted: int) -> Key:
    """The row of new memory for so many rows."""
    return Key("one process", MEMORY, 0, rows=inserted)


def memory_subject(inserted: int) -> Subject:
    """Seconds until one process has written to new memory for so many rows: no table can grow faster."""

    @contextmanager
    def opened() -> Iterator[Crew]:
        with Child(memory_user, int(ASKED_ROW_BYTES * inserted)) as child:
            child.ready()
            yield Crew([child])

    return Subject((memory_key(inserted),), opened)


@contextmanager
def memory_user(size_bytes: int) -> Iterator[Loop]:
    """The role of the process that takes memory, as a table does: huge pages where there are some."""

    def take() -> None:
        memory = mmap.mmap(-1, size_bytes)
        memory.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1

    yield Loop({MEMORY: take})


class Growing:
    """A ``Running``: one worker inserts, another looks rows up every few milliseconds."""

    def __init__(
        self, grower: Child, watcher: Child, shard: psutil.Process, inserted: int, at_once: int = AT_ONCE
    ) -> None:
        self._grower = grower
        self._watcher = watcher
        self._shard = shard
        self._inserted = inserted
        self._at_once = at_once

    def run(self, operation: str, count: int, warm_up: int) -> dict[str, list[float]]:
        """See ``Running``. Once: a table that is full already has no rows to be inserted."""
        self._grower.call("insert", 0, _WATCHED, self._at_once)
        self._watcher.call("watch")
        before = self._shard.memory_info().rss
        in_steps, in_all = self._grower.call("insert", _WATCHED, _WATCHED + self._inserted, self._at_once)
        waits = self._watcher.call("waits")
        taken = self._shard.memory_info().rss - before
        return {
            "seconds": [in_steps],
            "with_look_ups_seconds": [in_all],
            "million_rows": [self._inserted / MILLION],
            "longest_wait_seconds": [max(waits)],
            "median_wait_seconds": [statistics.median(waits)],
            "asked_wait_seconds": [ASKED_WAIT_SECONDS],
            "rows_bytes": [float(taken)],
            "bound_bytes": [ASKED_ROW_BYTES * self._inserted],
        }

    def rest(self) -> None:
        """Workers keep their leases."""

    def wake(self) -> None:
        """Workers keep their leases."""


class TableUser:
    """The object of both workers: inserts rows, or watches what others wait for. Used from one thread at a time."""

    def __init__(self, module: Embedding, optimizer: torch.optim.Optimizer) -> None:
        self._module = module
        self._optimizer = optimizer
        self._watcher: threading.Thread | None = None
        self._ended = threading.Event()
        self._waits: list[float] = []

    def insert(self, begin: int, end: int, at_once: int) -> tuple[float, float]:
        """Give the ids of these numbers rows: seconds of the steps alone, and with the look-ups before them."""
        in_steps, began = 0.0, time.perf_counter()
        for first in range(begin, end, at_once):
            ids = torch.from_numpy(scattered(first, min(end, first + at_once)))
            give_gradients(self._module, self._optimizer, ids)
            stepped = time.perf_counter()
            self._optimizer.step()
            in_steps += time.perf_counter() - stepped
        self._optimizer.zero_grad()
        return in_steps, time.perf_counter() - began

    def watch(self) -> None:
        """From now on look the first rows up again and again, in a thread of its own."""
        self._look_up()  # The first time, compiled code is loaded.
        self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._waits or not self._ended.wait(_PAUSE_SECONDS):
            began = time.perf_counter()
            self._look_up()
            self._waits.append(time.perf_counter() - began)

    def _look_up(self) -> None:
        with torch.no_grad():
            self._module(torch.from_numpy(scattered(0, _WATCHED)))

    def waits(self) -> list[float]:
        """Seconds that each look-up took since ``watch``, which ends."""
        self._ended.set()
        if self._watcher:
            self._watcher.join()
        return self._waits


@contextmanager
def worker(rank: int, address: str, transport: str) -> Iterator[TableUser]:
    """The role of both workers."""
    with ours.connected(address, rank, transport) as connection:
        module = connection.embedding(DIM, name="rows", optimizer=rows.RowWiseAdagrad(lr=0.01))
        yield TableUser(module, optimizer_of(connection, module))
