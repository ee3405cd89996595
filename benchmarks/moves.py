"""What moving slices costs a training: ``python -m benchmarks.moves``. Everything in one run, on one machine."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
import torch

from benchmarks import ours, report
from benchmarks.cluster import BenchCluster, running_cluster
from benchmarks.crew import Crew
from benchmarks.durability import disk
from benchmarks.processes import Child
from benchmarks.rows import MB, size
from benchmarks.tables.ids import DIM, power_law, scattered
from benchmarks.tables.rates import fill, give_gradients, optimizer_of
from benchmarks.timing import Loop
from ps_protocol.client.coordinator import CoordinatorClient
from ps_worker import rows

T = TypeVar("T")

_TURN = 5
"""Steps between two looks at whether the move is over."""

_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "adam": {"optimizer": torch.optim.Adam},
}
"""What the worker is given: without state, with one tensor of it, with two."""

_LOG_BYTES = 2 << 30

_STORAGE: dict[str, list[str]] = {
    "memory": [],
    "durable": ["--log-mb", str(_LOG_BYTES >> 20)],
    "fsync": ["--log-mb", str(_LOG_BYTES >> 20), "--fsync"],
}
"""By --durability: what shards are given."""

_IDS = 10_000
"""Of one step on a table."""


@click.command()
@click.option("--nbytes", type=click.IntRange(4), default=512 * MB, show_default=True, help="Bytes of parameters.")
@click.option(
    "--rows",
    "table_rows",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="A table of so many, in their place.",
)
@click.option("--tensors", type=click.IntRange(2), default=64, show_default=True, help="Variables they are cut into.")
@click.option("--batch-mb", type=click.IntRange(0), default=0, show_default=True, help="As of psctl move.")
@click.option("--transports", default="shm,grpc", show_default=True)
@click.option("--durability", default="memory,durable", show_default=True, help="And fsync: durable with --fsync.")
@click.option("--optimizer", type=click.Choice(list(_OPTIMIZERS)), default="sgd", show_default=True)
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Where shards keep their data.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Write JSON here.")
def main(
    nbytes: int,
    table_rows: int,
    tensors: int,
    batch_mb: int,
    transports: str,
    durability: str,
    optimizer: str,
    folder: Path | None,
    output: Path | None,
) -> None:
    """Steps of one worker while a third shard is added to two, and while the first is drained.

    Before, it trains until the logs of durable shards have their size.
    """
    found: dict[str, Any] = {"machine": report.machine(), "bytes": nbytes, "rows": table_rows}
    with tempfile.TemporaryDirectory(prefix="ps-moves-", dir=folder) as root:
        for transport in transports.split(","):
            for kind in durability.split(","):
                name = f"{transport}, {kind}, {f'{table_rows} rows' if table_rows else optimizer}"
                with trained(Path(root), kind, transport, nbytes, tensors, optimizer, table_rows) as job:
                    if _STORAGE[kind] and not table_rows:
                        job.steps(math.ceil(8 * _LOG_BYTES / nbytes))
                    found[name] = moved(job, name, batch_mb * MB)
                    if _STORAGE[kind]:
                        found[f"{name}, disk"] = beside_it(job, Path(root), found[name]["added"])
    if output:
        output.write_text(json.dumps(found, indent=2) + "\n")


@dataclass
class _Job:
    cluster: BenchCluster
    crew: Crew

    def steps(self, count: int) -> list[float]:
        """Seconds of each of ``count`` steps."""
        return self.crew.run(ours.STEP, count, 0)["seconds"]


@contextmanager
def trained(
    root: Path, kind: str, transport: str, nbytes: int, tensors: int, optimizer: str, table_rows: int
) -> Iterator[_Job]:
    """Two shards and one worker, all processes of their own."""
    place = root / f"{transport}-{kind}"
    options = ["--data-dir", str(place), *_STORAGE[kind]] if _STORAGE[kind] else []
    with ExitStack() as stack:
        cluster = stack.enter_context(running_cluster(shards=2, options=options))
        sizes = (nbytes, tensors, _OPTIMIZERS[optimizer])
        worker = stack.enter_context(
            Child(table_worker, cluster.address, transport, table_rows)
            if table_rows
            else Child(ours.worker, 0, cluster.address, transport, *sizes)
        )
        worker.ready()
        yield _Job(cluster, Crew([worker]))
    shutil.rmtree(place, ignore_errors=True)


@contextmanager
def table_worker(address: str, transport: str, count: int) -> Iterator[Loop]:
    """The role of a worker whose steps look up, and change, rows of a table of ``count``, by a power law."""
    with ours.connected(address, 0, transport) as connection, ours.undisturbed() as check:
        module = connection.embedding(DIM, name="rows", optimizer=rows.RowWiseAdagrad(lr=0.01))
        optimizer = optimizer_of(connection, module)
        fill(module, optimizer, 0, count)
        chance, ids = np.random.default_rng(0), scattered(0, count)

        def step() -> None:
            drawn = np.unique(power_law(chance, _IDS, count))
            give_gradients(module, optimizer, torch.from_numpy(ids[drawn]))
            optimizer.step()
            check()

        yield Loop({ours.STEP: step})


def moved(job: _Job, name: str, batch_bytes: int) -> dict[str, Any]:
    """Steps before, while slices go to a new shard, and while another is drained."""
    job.steps(10)
    plain = job.steps(40)
    added = job.cluster.add_shard()
    with CoordinatorClient(job.cluster.address) as client:
        found = {
            "added": _during(job, lambda: list(client.move(to=[added], batch_bytes=batch_bytes)), plain),
            "drained": _during(job, lambda: list(client.move(drain=[0], batch_bytes=batch_bytes)), plain),
        }
    for what, figures in found.items():
        click.echo(
            f"{name}, a shard {what}: {size(figures['moved_bytes'])} in {figures['batches']} batches and "
            f"{figures['seconds']:.1f} s; pause {figures['pause'] * 1e3:.0f} ms "
            f"(longest {figures['longest pause'] * 1e3:.0f}); "
            f"{figures['rate']:.0%} of the steps per second before; longest step {figures['longest step'] * 1e3:.0f} ms"
            f" (before: median {statistics.median(plain) * 1e3:.0f}, longest {max(plain) * 1e3:.0f})"
        )
    return found


def _during(job: _Job, move: Callable[[], list[Any]], plain: list[float]) -> dict[str, Any]:
    """Train until ``move`` has returned."""
    began = time.perf_counter()
    result, seconds = _training(job, move)
    passed = time.perf_counter() - began
    progress = [each for each in result if each.pause_seconds]
    pauses = [each.pause_seconds for each in progress]
    return {
        "moved_bytes": progress[-1].moved_bytes,
        "batches": len(pauses),
        "seconds": passed,
        "pause": statistics.median(pauses),
        "longest pause": max(pauses),
        "rate": len(seconds) / sum(seconds) / (len(plain) / sum(plain)),
        "longest step": max(seconds),
    }


def beside_it(job: _Job, folder: Path, added: dict[str, Any]) -> dict[str, float]:
    """What the disk takes for the bytes of a batch while the job trains: that part of a pause is not ours."""
    return _training(job, lambda: disk(folder, added["moved_bytes"] // added["batches"]))[0]


def _training(job: _Job, work: Callable[[], T]) -> tuple[T, list[float]]:
    """What ``work`` returns, and the seconds of each step meanwhile."""
    with ThreadPoolExecutor(1) as thread:
        seconds, working = list[float](), thread.submit(work)
        while not working.done():
            seconds += job.steps(_TURN)
    return working.result(), seconds


if __name__ == "__main__":
    main()
