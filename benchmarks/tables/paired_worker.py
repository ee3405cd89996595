"""The worker of ``benchmarks.tables.paired``: each line of its input is an operation and how often; prints a median."""

from __future__ import annotations

import json
import statistics
import sys
import time

import numpy as np
import torch
from torch import nn

import ps_worker
from ps_worker import rows

ROWS, DIM, IDS, INSERTED = 1_000_000, 16, 14_000, 100_000
_BATCHES = 20
#: Odd, so that multiples of it, modulo 2**64, are all different.
_SCATTER = 0x9E3779B97F4A7C15


class Table:
    """A table with its rows. Each method is one operation; the seconds of each."""

    def __init__(self, cluster: ps_worker.Cluster) -> None:
        self._module = cluster.embedding(DIM, name="rows", optimizer=rows.SGD(lr=0.01))
        model = nn.ModuleList([self._module, nn.Linear(1, 1)])
        self._optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.01)
        self._next = 0
        while self._next < ROWS:
            self.insert()
        rng = np.random.default_rng(0)
        self._batches = [scattered(rng.choice(ROWS, IDS, replace=False)) for _ in range(_BATCHES)]
        self._turn = 0

    def pull(self) -> float:
        """The rows of 14,000 ids, chosen evenly."""
        begun = time.perf_counter()
        with torch.no_grad():
            self._module(self._batch())
        return time.perf_counter() - begun

    def step(self) -> float:
        """The same, and a gradient for each pushed and applied."""
        self._optimizer.zero_grad()
        begun = time.perf_counter()
        self._module(self._batch()).sum().backward()
        self._optimizer.step()
        return time.perf_counter() - begun

    def insert(self) -> float:
        """100,000 new ids looked up and pushed."""
        ids = scattered(np.arange(self._next, self._next + INSERTED))
        self._next += INSERTED
        self._optimizer.zero_grad()
        begun = time.perf_counter()
        found = self._module(ids)
        found.backward(torch.full_like(found, 1e-3))
        self._optimizer.step()
        return time.perf_counter() - begun

    def _batch(self) -> torch.Tensor:
        self._turn += 1
        return self._batches[self._turn % _BATCHES]


def scattered(numbers: np.ndarray) -> torch.Tensor:
    """Different ids of any value."""
    return torch.from_numpy((numbers.astype(np.uint64) * np.uint64(_SCATTER)).view(np.int64))


def main(address: str, transport: str) -> None:
    """Work until the input ends."""
    torch.set_num_threads(1)
    with ps_worker.connect(address, rank=0, device="cpu", transport=transport) as cluster:
        table = Table(cluster)
        operations = {"pull": table.pull, "step": table.step, "insert": table.insert}
        print("ready", flush=True)
        for line in sys.stdin:
            name, count = line.split()
            seconds = [operations[name]() for _ in range(int(count))]
            print(json.dumps({"median": statistics.median(seconds), "peak": 0}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
