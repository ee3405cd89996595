"""Rows per second, there and back: what one worker pulls from a table and pushes to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import nn

import ps_worker
from benchmarks import ours
from benchmarks.cluster import running_cluster
from benchmarks.crew import Crew
from benchmarks.processes import Child
from benchmarks.rows import Key, Subject
from benchmarks.tables.ids import DIM, power_law, scattered
from benchmarks.timing import Loop
from ps_worker import rows
from ps_worker.tables import Embedding

PULL, PUSH_SGD, PUSH_ROWWISE = "rows pulled", "rows pushed, SGD", "rows pushed, row-wise Adagrad"
OPERATIONS = (PULL, PUSH_SGD, PUSH_ROWWISE)

DRAWN = 100_000
"""Ids of one operation; each is asked for and pushed once."""

MILLION = 1e6

_FILLED_AT_ONCE = 100_000


def key(transport: str, operation: str, table_rows: int) -> Key:
    """The row of one operation on a table of so many rows."""
    return Key(ours.system(transport), operation, 0, rows=table_rows)


def subject(transport: str, table_rows: int) -> Subject:
    """Seconds to pull, or to push and apply, the different ones of 100,000 ids by a power law; beside it how many."""

    @contextmanager
    def opened() -> Iterator[_Rated]:
        with ExitStack() as stack:
            cluster = stack.enter_context(running_cluster())
            child = stack.enter_context(Child(worker, cluster.address, transport, table_rows))
            child.ready()
            yield _Rated(child, cluster.shards)

    return Subject(tuple(key(transport, operation, table_rows) for operation in OPERATIONS), opened)


class _Rated(Crew):
    """A ``Crew`` of one worker whose samples say how many rows an operation has."""

    def __init__(self, child: Child, shards: list[int]) -> None:
        super().__init__([child], shards)
        self._rows = child.call("rows_at_once")

    def run(self, operation: str, count: int, warm_up: int) -> dict[str, list[float]]:
        """See ``Running``."""
        return super().run(operation, count, warm_up) | {"million_rows": [self._rows / MILLION]}


class RowLoop(Loop):
    """A ``Loop`` whose operations have some rows each."""

    def __init__(
        self,
        ids: torch.Tensor,
        operations: Mapping[str, Callable[[], object]],
        before: Mapping[str, Callable[[], object]],
    ) -> None:
        super().__init__(operations, before)
        self._rows = len(ids)

    def rows_at_once(self) -> int:
        """Rows of one operation."""
        return self._rows


@contextmanager
def worker(address: str, transport: str, table_rows: int) -> Iterator[RowLoop]:
    """The role of the process that is timed: two tables of ``table_rows`` rows, one for each row optimizer."""
    with ours.connected(address, 0, transport) as connection, ours.undisturbed() as check:
        sgd = connection.embedding(DIM, name="sgd", optimizer=rows.SGD(lr=0.01))
        rowwise = connection.embedding(DIM, name="rowwise", optimizer=rows.RowWiseAdagrad(lr=0.01))
        optimizer = optimizer_of(connection, sgd, rowwise)
        for module in (sgd, rowwise):
            fill(module, optimizer, 0, table_rows)
        # In no order that a shard could profit from: each id by its first appearance.
        drawn = power_law(np.random.default_rng(0), DRAWN, table_rows)
        numbers = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
        ids = torch.from_numpy(scattered(0, table_rows)[numbers])

        def pull() -> None:
            with torch.no_grad():
                sgd(ids)
            check()

        def push() -> None:
            optimizer.step()
            check()

        yield RowLoop(
            ids,
            {PULL: pull, PUSH_SGD: push, PUSH_ROWWISE: push},
            {
                PUSH_SGD: lambda: give_gradients(sgd, optimizer, ids),
                PUSH_ROWWISE: lambda: give_gradients(rowwise, optimizer, ids),
            },
        )


def optimizer_of(connection: ps_worker.Cluster, *modules: Embedding) -> torch.optim.Optimizer:
    """An optimizer of these, and of two numbers besides: a model has parameters."""
    return connection.optimizer(torch.optim.SGD, nn.ModuleList([*modules, nn.Linear(1, 1)]), lr=0.01)


def give_gradients(module: Embedding, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    """Have ``optimizer`` push a small gradient for each of ``ids`` at its next step, and nothing else."""
    optimizer.zero_grad()
    found = module(ids)
    found.backward(torch.full_like(found, 1e-3))


def fill(module: Embedding, optimizer: torch.optim.Optimizer, begin: int, end: int) -> None:
    """Let the table have rows for the ids of these numbers."""
    for first in range(begin, end, _FILLED_AT_ONCE):
        give_gradients(module, optimizer, torch.from_numpy(scattered(first, min(end, first + _FILLED_AT_ONCE))))
        optimizer.step()
    optimizer.zero_grad()
