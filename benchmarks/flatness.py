"""Memory of a shard over many pushes and of a coordinator over many joins: ``python -m benchmarks.flatness``."""

from __future__ import annotations

import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks import ours, report
from benchmarks.cluster import running_cluster
from benchmarks.crew import Crew
from benchmarks.processes import Child
from benchmarks.rows import KB, MB
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import JoinRequest, Role

_MARKS = 10
"""How often memory is looked at."""


@click.command()
@click.option("--pushes", type=click.IntRange(_MARKS), default=1_000_000, show_default=True)
@click.option("--joins", type=click.IntRange(_MARKS), default=10_000, show_default=True)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Write JSON here.")
def main(pushes: int, joins: int, output: Path | None) -> None:
    """Push 10 KB again and again to a durable shard; then let workers join a coordinator and leave it."""
    found: dict[str, Any] = {"machine": report.machine()}
    with tempfile.TemporaryDirectory(prefix="ps-flatness-") as root:
        found["shard"] = shard(Path(root), pushes)
    found["coordinator"] = coordinator(joins)
    if output:
        output.write_text(json.dumps(found, indent=2) + "\n")


def shard(root: Path, pushes: int) -> list[tuple[int, float, float]]:
    """(pushes, resident MB, MB on disk) after each tenth; its snapshots cut the log every 50,000 records."""
    options = ["--data-dir", str(root)]
    seen = []
    with ExitStack() as stack:
        cluster = stack.enter_context(running_cluster(options=options))
        sizes = (cluster.address, ours.SHM, 10 * KB, 1, {"momentum": 0.9})
        worker = stack.enter_context(Child(ours.worker, 0, *sizes))
        worker.ready()
        crew, process = Crew([worker]), psutil.Process(cluster.shards[0])
        for mark in range(1, _MARKS + 1):
            began = time.perf_counter()
            crew.run(ours.STEP, pushes // _MARKS, 0)
            rate = pushes / _MARKS / (time.perf_counter() - began)
            resident = process.memory_info().rss / MB
            disk = sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) / MB
            seen.append((mark * pushes // _MARKS, resident, disk))
            click.echo(f"{seen[-1][0]:>9,} pushes: {resident:.1f} MB, on disk {disk:.0f} MB, {rate:,.0f} pushes/s")
    return seen


def coordinator(joins: int) -> list[tuple[int, float]]:
    """(joins, resident MB) after each tenth."""
    seen = []
    with running_cluster(shards=1, workers=0) as cluster, CoordinatorClient(cluster.address) as client:
        process = psutil.Process(cluster.coordinator)
        for number in range(1, joins + 1):
            joined = client.join(JoinRequest(Role.WORKER, None, ""), f"token {number}")
            client.leave(joined.member, "", 5.0)
            if number % (joins // _MARKS) == 0:
                seen.append((number, process.memory_info().rss / MB))
                click.echo(f"{number:>9,} joins: coordinator {seen[-1][1]:.1f} MB")
    return seen


if __name__ == "__main__":
    main()
