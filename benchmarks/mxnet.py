"""Dense steps beside MXNet: ``python -m benchmarks.mxnet PYTHON``, an interpreter that has MXNet.

One worker and one server of each; MXNet's ``dist_async`` and torch-ps make blocks of steps in turn: push, SGD, and
pull, of one array whose gradient is filled before each step. Shown are medians of blocks, the median of the ratios of
neighbouring blocks with their quartiles, and the 99th percentile of all steps in units of their median.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks import other_python, ours
from benchmarks.cluster import running_cluster

SIZES = {
    "10 KB": (10_000, 200, 20),
    "1 MB": (1_000_000, 100, 20),
    "4 MB": (4_000_000, 40, 15),
    "10 MB": (10_000_000, 20, 15),
    "100 MB": (100_000_000, 4, 12),
}
"""Bytes of parameters, steps in a block, blocks."""


def main() -> int:
    """Print a row for each size and transport."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", type=Path, help="the interpreter that has MXNet")
    parser.add_argument("--only", choices=SIZES, action="append", help="a size; may be repeated")
    parser.add_argument("--transport", choices=ours.TRANSPORTS, action="append", help="a transport; may be repeated")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for size in options.only or SIZES:
        nbytes, steps, blocks = SIZES[size]
        with other_python.running(options.python, "mxnet_steps.py", nbytes) as theirs:
            for transport in options.transport or ours.TRANSPORTS:
                with (
                    running_cluster() as cluster,
                    ours.worker(0, cluster.address, transport, nbytes, 1, {}) as loop,
                ):
                    found = [(loop.run(ours.FRESH, steps), theirs(steps)) for _ in range(blocks + 1)]
                # The first block of each warms up.
                print(row(f"{size:7}{transport:5}", found[1:]), flush=True)
    return 0


def row(name: str, blocks: Sequence[tuple[Sequence[float], Sequence[float]]]) -> str:
    """Medians of both in milliseconds, and how many times faster the first is."""
    own, other = ([statistics.median(pair[side]) for pair in blocks] for side in range(2))
    low, middle, high = np.percentile(np.divide(other, own), (25, 50, 75))
    tails = [
        float(np.percentile(every, 99) / np.median(every)) for every in map(np.concatenate, zip(*blocks, strict=True))
    ]
    return (
        f"{name}   {statistics.median(own) * 1e3:7.3f} ms, p99 {tails[0]:.1f}   "
        f"MXNet {statistics.median(other) * 1e3:7.3f} ms, p99 {tails[1]:.1f}   "
        f"ratio {middle:.2f} [{low:.2f} - {high:.2f}]"
    )


if __name__ == "__main__":
    sys.exit(main())
