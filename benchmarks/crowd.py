"""Steps of many workers of one shard: ``python -m benchmarks.crowd [--transport bulk]``.

In async, with one model of ``--nbytes``, plain SGD, and gradients that are there already. First one worker alone; then
the same beside three that wait ``--slow-ms`` before each step; then 16 workers that do not wait, on the cores there
are. Each makes steps for ``--seconds``. Shown are steps per second of all that do not wait, the median and the 99th
percentile of a step, and how many steps the slowest and the fastest of them made.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

import ps_worker
from benchmarks.cluster import running_cluster
from benchmarks.forked import answers, forked
from benchmarks.ours import TRANSPORTS

SLOW, MANY = 3, 16


def worker(address: str, rank: int, transport: str, nbytes: int, seconds: float, wait_seconds: float) -> list[float]:
    """Seconds of each step of one worker, begun when all are there."""
    torch.set_num_threads(1)
    with ps_worker.connect(address, rank=rank, transport=transport) as cluster:
        model = nn.ParameterList([nn.Parameter(torch.zeros(nbytes // 4))])
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=1e-6)
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        cluster.barrier()
        taken, end = [], time.perf_counter() + seconds
        while (begun := time.perf_counter()) < end:
            time.sleep(wait_seconds)
            begun = time.perf_counter()
            optimizer.step()
            taken.append(time.perf_counter() - begun)
        cluster.barrier()
    return taken


def measured(options: argparse.Namespace, transport: str, waits: Sequence[float]) -> list[list[float]]:
    """Seconds of each step of the workers that do not wait; ``waits``: of each worker, seconds before a step."""
    with running_cluster(workers=len(waits)) as cluster:
        started = [
            forked(worker, cluster.address, rank, transport, options.nbytes, options.seconds, wait)
            for rank, wait in enumerate(waits)
        ]
        return [taken for taken, wait in zip(answers(started), waits, strict=True) if not wait]


def row(name: str, seconds: float, steps: Sequence[Sequence[float]]) -> str:
    """The figures of one arrangement."""
    everything = [each for taken in steps for each in taken]
    counts = sorted(map(len, steps))
    middle, high = statistics.median(everything), np.percentile(everything, 99)
    return (
        f"{name:28} {len(everything) / seconds:7.0f} steps/s   median {middle * 1e3:6.2f} ms   p99 {high * 1e3:6.2f} ms"
        f"   {counts[0]} to {counts[-1]} steps each"
    )


def main() -> int:
    """Print a row for each arrangement and transport."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transport", choices=TRANSPORTS, action="append", help="a transport; may be repeated")
    parser.add_argument("--nbytes", type=int, default=1_000_000, help="of parameters")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--slow-ms", type=float, default=50.0)
    options = parser.parse_args()
    wait = options.slow_ms / 1e3
    arrangements = {
        "1 worker": [0.0],
        f"beside {SLOW} slow ones": [0.0, *[wait] * SLOW],
        f"{MANY} workers, {os.cpu_count()} cores": [0.0] * MANY,
    }
    for transport in options.transport or TRANSPORTS:
        for name, waits in arrangements.items():
            print(row(f"{transport}, {name}", options.seconds, measured(options, transport, waits)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
