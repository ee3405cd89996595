"""CPU of a training step with many small tables, beside the same model with ``nn.EmbeddingBag``: both sides together.

``python -m benchmarks.tables.small [TABLES] [STEPS]``; ``--profile`` shows where the worker's goes.
"""

from __future__ import annotations

import cProfile
import os
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.cluster import running_cluster
from ps_worker import connect, rows
from ps_worker.tables import EmbeddingBags, Table
from ps_worker.tables.converted import convert_embeddings

ROWS, DIM, SAMPLES = 1000, 16, 64
_TICKS = os.sysconf("SC_CLK_TCK")


class Features(torch.nn.Module):
    """An embedding for each feature, as click models of other libraries have them, below a dense layer."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.features = torch.nn.ModuleList(torch.nn.EmbeddingBag(ROWS, DIM, mode="sum") for _ in range(count))
        self.top = torch.nn.Linear(count * DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids``: int64 [features, samples, 1]."""
        parts = [feature(each) for feature, each in zip(self.features, ids, strict=True)]
        result: torch.Tensor = self.top(torch.cat(parts, 1))
        return result


class Together(torch.nn.Module):
    """The same features in one ``EmbeddingBags``: one message per shard and step."""

    def __init__(self, count: int) -> None:
        super().__init__()
        tables = {f"t{i}": Table(DIM, name=f"t{i}", optimizer=rows.SGD(lr=0.1), buckets=16) for i in range(count)}
        self.features = EmbeddingBags(tables, mode="sum")
        self.top = torch.nn.Linear(count * DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids``: int64 [features, samples, 1]."""
        parts = self.features(dict(zip(self.features.features, ids, strict=True)))
        result: torch.Tensor = self.top(torch.cat(list(parts.values()), 1))
        return result


KINDS: dict[str, Callable[[int], torch.nn.Module]] = {
    "dense embeddings": Features,
    "tables, each a module": lambda count: convert_embeddings(Features(count), min_rows=1, optimizer=rows.SGD(lr=0.1)),
    "tables in one EmbeddingBags": Together,
}


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def measure(count: int, steps: int, kind: str, *, profile: bool) -> tuple[float, float]:
    """Milliseconds of CPU of a step, in the worker and in the shard."""
    with running_cluster() as cluster, connect(cluster.address) as connection:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = KINDS[kind](count)
        optimizer = connection.optimizer(torch.optim.SGD, model, lr=0.1)
        ids = torch.randint(ROWS, (8, count, SAMPLES, 1))
        for step in range(8):
            _step(model, optimizer, ids[step])
        [shard] = cluster.shards
        profiler = cProfile.Profile()
        before = time.process_time(), cpu_seconds(shard)
        if profile:
            profiler.enable()
        for step in range(steps):
            _step(model, optimizer, ids[step % 8])
        if profile:
            profiler.disable()
            pstats.Stats(profiler).sort_stats("tottime").print_stats(35)
        after = time.process_time(), cpu_seconds(shard)
    return 1e3 * (after[0] - before[0]) / steps, 1e3 * (after[1] - before[1]) / steps


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    model(ids).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    """Entry point."""
    numbers = [int(each) for each in sys.argv[1:] if each.isdigit()]
    count, steps = (*numbers, 52, 100)[0], (*numbers, 100)[1] if len(numbers) > 1 else 100
    for kind in KINDS:
        worker, shard = measure(count, steps, kind, profile="--profile" in sys.argv)
        print(f"{count} {kind}: worker {worker:.1f} ms, shard {shard:.1f} ms of CPU a step")


if __name__ == "__main__":
    main()
