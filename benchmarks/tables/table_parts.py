"""What a table does, in two checkouts side by side: ``python -m benchmarks.tables.table_parts OTHER``.

Without worker and wire. A process of each tree has a table of 10^6 rows of 16 numbers, and the two do blocks of
operations in turn: 14,000 rows looked up, 14,000 rows updated that were just looked up, 20,000 rows inserted that were
just looked up and for which the table was prepared, and the same with the lookup and what prepares it. A row has the
CPU time of an operation, medians of blocks, of both trees and as ratio (this tree / OTHER) with its quartiles.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from ps_protocol.model.tables import Ids
from ps_server.tables import RowStep, ShardTable
from ps_worker import rows
from ps_worker.tables.table import Table

ROWS, DIM, IDS, INSERTED = 1_000_000, 16, 14_000, 20_000
OPTIMIZERS = {"sgd": rows.SGD, "rowwise": rows.RowWiseAdagrad, "adam": rows.Adam}
OPERATIONS = ("look up", "update", "insert", "in all")
_BATCHES, _IN_A_BLOCK = 20, 10
#: Odd, so that multiples of it, modulo 2**64, are all different.
_SCATTER = 0x9E3779B97F4A7C15


class Worked:
    """A table, and the CPU seconds of what is done with it."""

    def __init__(self, optimizer: str) -> None:
        spec = Table(DIM, name="rows", optimizer=OPTIMIZERS[optimizer](lr=0.01)).spec(1)
        self._table, self._options = ShardTable(spec, range(spec.buckets)), spec.options
        self._rows = self._turn = 0
        while self._rows < ROWS:
            self.seconds("insert")
        rng = np.random.default_rng(0)
        self._batches = [scattered(rng.choice(ROWS, IDS, replace=False)) for _ in range(_BATCHES)]

    def seconds(self, operation: str) -> float:
        """Of one operation."""
        if operation in ("insert", "in all"):
            ids = scattered(np.arange(self._rows, self._rows + INSERTED))
            self._rows += INSERTED
        else:
            self._turn += 1
            ids = self._batches[self._turn % _BATCHES]
        values = np.full((ids.size, DIM), 1e-3, np.float32)
        begun = time.thread_time()
        self._table.look_up(ids, np.empty_like(values))
        if operation == "look up":
            return time.thread_time() - begun
        self._prepare(ids)
        if operation != "in all":
            begun = time.thread_time()
        self._table.apply(RowStep(0, ids, values, self._table.updates + 1, self._options))
        return time.thread_time() - begun

    def _prepare(self, ids: Ids) -> None:
        if not hasattr(self._table, "prepare"):
            return  # a tree from before there was something to prepare
        if ahead := self._table.memory_ahead(ids):
            ahead()
        while self._table.prepare(ids):
            pass


def scattered(numbers: np.ndarray) -> Ids:
    """Different ids of any value."""
    return (numbers.astype(np.uint64) * np.uint64(_SCATTER)).view(np.int64)


@contextmanager
def running(tree: Path, optimizer: str) -> Iterator[subprocess.Popen[str]]:
    """A process with a table of ``tree``: it answers the name of an operation with the median of a block."""
    places = os.pathsep.join(map(str, (tree, tree / "protos")))
    command = [sys.executable, __file__, str(tree), "--optimizer", optimizer, "--answer"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tree, env={**os.environ, "PYTHONPATH": places}, **pipes)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def asked(process: subprocess.Popen[str], operation: str) -> float:
    """Seconds of an operation in one block."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(operation, file=process.stdin, flush=True)
    return float(process.stdout.readline())


def main() -> None:
    """Print a row for each operation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        table = Worked(options.optimizer)
        for line in sys.stdin:
            found = [table.seconds(line.strip()) for _ in range(_IN_A_BLOCK)]
            print(statistics.median(found), flush=True)
        return
    from benchmarks.paired import ROOT, compared

    with ExitStack() as stack:
        trees = options.other.resolve(), ROOT
        processes = [stack.enter_context(running(tree, options.optimizer)) for tree in trees]
        for operation in OPERATIONS:
            found: tuple[list[float], list[float]] = ([], [])
            for block in range(options.blocks + 1):
                for which in (0, 1) if block % 2 == 0 else (1, 0):
                    found[which].append(asked(processes[which], operation))
            # The first block of each warms up.
            print(f"{options.optimizer:8} {operation:8} {compared(found[0][1:], found[1][1:])}", flush=True)


if __name__ == "__main__":
    main()
