"""What a checkpoint holds after few rows have changed, beside one that holds all rows."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from benchmarks import ours
from benchmarks.cluster import running_cluster
from benchmarks.processes import Child
from benchmarks.rows import Key, Subject
from benchmarks.tables.ids import DIM
from benchmarks.tables.rates import fill, optimizer_of
from ps_protocol.client.coordinator import CoordinatorClient
from ps_worker import rows
from ps_worker.tables import Embedding

_OPTIONS = ("--checkpoint-full-every", "1000")

OPERATION = "checkpoint after 1 % of rows changed"


def key(table_rows: int) -> Key:
    """The row of a table of so many rows."""
    return Key("ours", OPERATION, 0, rows=table_rows)


def subject(table_rows: int) -> Subject:
    """Bytes and seconds of a checkpoint of row-wise Adagrad after 1 % of the rows changed; beside it the full one's."""

    @contextmanager
    def opened() -> Iterator[Saved]:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ps-bench-"))
            place = "--checkpoint-dir", folder
            cluster = stack.enter_context(running_cluster(options=place, coordinator_options=(*_OPTIONS, *place)))
            child = stack.enter_context(Child(worker, cluster.address))
            child.ready()
            child.call("touch", 0, table_rows)
            yield Saved(child, stack.enter_context(CoordinatorClient(cluster.address)), table_rows)

    return Subject((key(table_rows),), opened)


class Saved:
    """A ``Running`` whose samples are bytes, too."""

    def __init__(self, child: Child, client: CoordinatorClient, table_rows: int) -> None:
        self._child = child
        self._client = client
        self._rows = table_rows

    def run(self, operation: str, count: int, warm_up: int) -> dict[str, list[float]]:
        """See ``Running``. Once: the first checkpoint is the full one."""
        _, full, full_seconds = self._client.checkpoint()
        self._child.call("touch", 0, self._rows // 100)
        _, increment, seconds = self._client.checkpoint()
        return {
            "seconds": [seconds],
            "full_seconds": [full_seconds],
            "increment_bytes": [float(increment)],
            "full_bytes": [float(full)],
        }

    def rest(self) -> None:
        """The worker keeps its lease."""

    def wake(self) -> None:
        """The worker keeps its lease."""


class Toucher:
    """The object of the worker. Used from one thread."""

    def __init__(self, module: Embedding, optimizer: torch.optim.Optimizer) -> None:
        self._module = module
        self._optimizer = optimizer

    def touch(self, begin: int, end: int) -> None:
        """Push a gradient for the ids of these numbers."""
        fill(self._module, self._optimizer, begin, end)


@contextmanager
def worker(address: str) -> Iterator[Toucher]:
    """The role of the worker."""
    with ours.connected(address, 0, None) as connection:
        module = connection.embedding(DIM, name="rows", optimizer=rows.RowWiseAdagrad(lr=0.01))
        yield Toucher(module, optimizer_of(connection, module))
