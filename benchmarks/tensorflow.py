"""Rows per second beside TensorFlow: ``python -m benchmarks.tensorflow PYTHON``, an interpreter that has TensorFlow.

One worker and one server of each; the cluster of TensorFlow and that of torch-ps make blocks of steps in turn. A step
pulls the rows of different ids, chosen evenly, and pushes a gradient for each, which is applied with SGD. Shown are
millions of rows per second, pulled, and pulled and pushed: medians of blocks, and of the ratios of neighbouring blocks
with their quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from benchmarks import other_python, ours
from benchmarks.cluster import running_cluster
from benchmarks.tables.ids import scattered
from benchmarks.tables.rates import fill, optimizer_of
from ps_worker import rows

TRANSPORTS = ("shm", "bulk", "grpc")

#: Seconds of each pull, and of each pull with its push.
Block = tuple[list[float], list[float]]


def main() -> int:
    """Print a row for each transport."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", type=Path, help="the interpreter that has TensorFlow")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--ids", type=int, default=14_000, help="different ids in a step")
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=50, help="in a block")
    parser.add_argument("--transport", choices=TRANSPORTS, action="append", help="a transport; may be repeated")
    options = parser.parse_args()
    sizes = (options.rows, options.dim, options.ids)
    with other_python.running(options.python, "tensorflow_rows.py", *sizes) as answered:

        def theirs(steps: int) -> Block:
            told = answered(steps)
            return told["pull"], told["step"]

        for transport in options.transport or TRANSPORTS:
            with torch_ps(transport, *sizes) as own:
                found = [(own(options.steps), theirs(options.steps)) for _ in range(options.blocks + 1)]
            # The first block of each warms up.
            print(row(transport, options.ids, found[1:]), flush=True)
    return 0


def row(name: str, ids: int, blocks: list[tuple[Block, Block]]) -> str:
    """Rates of both, and how many times faster the first is."""
    parts = [f"{name:5}"]
    for number, what in enumerate(("pulled", "pulled and pushed")):
        own, other = ([ids / statistics.median(pair[side][number]) / 1e6 for pair in blocks] for side in range(2))
        low, middle, high = np.percentile(np.divide(own, other), (25, 50, 75))
        parts.append(
            f"{what}: {statistics.median(own):.2f} M/s, TensorFlow {statistics.median(other):.2f}, "
            f"ratio {middle:.2f} [{low:.2f} - {high:.2f}]"
        )
    return "   ".join(parts)


@contextmanager
def torch_ps(transport: str, table_rows: int, dim: int, ids: int) -> Iterator[Callable[[int], Block]]:
    """Makes blocks of steps with a shard of its own."""
    torch.set_num_threads(1)
    with running_cluster() as cluster, ours.connected(cluster.address, 0, transport) as connection:
        module = connection.embedding(dim, name="rows", optimizer=rows.SGD(lr=0.01))
        optimizer = optimizer_of(connection, module)
        fill(module, optimizer, 0, table_rows)
        rng = np.random.default_rng(0)
        known = scattered(0, table_rows)
        batches = [torch.from_numpy(known[rng.choice(table_rows, ids, replace=False)]) for _ in range(20)]

        def block(steps: int) -> Block:
            pulls, whole = [], []
            for step in range(steps):
                begun = time.perf_counter()
                with torch.no_grad():
                    module(batches[step % len(batches)])
                pulls.append(time.perf_counter() - begun)
            for step in range(steps):
                optimizer.zero_grad()
                begun = time.perf_counter()
                module(batches[step % len(batches)]).sum().backward()
                optimizer.step()
                whole.append(time.perf_counter() - begun)
            return pulls, whole

        yield block


if __name__ == "__main__":
    sys.exit(main())
