"""What durability costs: ``python -m benchmarks.durability``. Everything in one run, on one machine."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks import ours, report
from benchmarks.cluster import BenchCluster, running_cluster
from benchmarks.crew import Crew
from benchmarks.processes import Child
from benchmarks.rows import MB, size
from benchmarks.timing import Figures
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import Member, Role

_FOLLOW_SECONDS = 40.0
"""For a standby to copy what it has not, before the shard is killed."""

_TURN = 5
"""Steps of one kind before the next kind has its turn."""


@click.command()
@click.option("--nbytes", type=click.IntRange(4), default=100 * MB, show_default=True, help="Bytes of parameters.")
@click.option("--rounds", type=click.IntRange(2), default=20, show_default=True, help="Turns of each kind.")
@click.option("--transports", default="shm,grpc", show_default=True)
@click.option("--state-mb", default=1000, show_default=True, help="Size of the shard that is killed and restarted.")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Where shards keep their data.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Write JSON here.")
def main(nbytes: int, rounds: int, transports: str, state_mb: int, folder: Path | None, output: Path | None) -> None:
    """Step time of durable shards, cost of their snapshots, time of a restart."""
    found: dict[str, Any] = {"machine": report.machine(), "bytes": nbytes}
    with tempfile.TemporaryDirectory(prefix="ps-durability-", dir=folder) as root:
        found["disk"] = disk(Path(root), nbytes)
        for transport in transports.split(","):
            found[transport] = steps(Path(root), transport, nbytes, rounds)
        found["snapshots"] = snapshots(Path(root), nbytes)
        found["restart"] = restart(Path(root), state_mb * MB)
        found["takeover"] = takeover(Path(root), state_mb * MB)
    if output:
        output.write_text(json.dumps(found, indent=2) + "\n")


def disk(root: Path, nbytes: int) -> dict[str, float]:
    """The disk by itself: writing a new file, overwriting it, and each with fdatasync."""
    data, path = os.urandom(nbytes), root / "plain"
    figures: dict[str, list[float]] = {"new": [], "overwrite": [], "overwrite and sync": []}
    for name in [name for _ in range(5) for name in figures]:
        if name == "new":
            path.unlink(missing_ok=True)
        began = time.perf_counter()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.pwrite(descriptor, data, 0)
        if "sync" in name:
            os.fdatasync(descriptor)
        os.close(descriptor)
        figures[name].append(time.perf_counter() - began)
    path.unlink()
    medians = {name: statistics.median(values) for name, values in figures.items()}
    for name, seconds in medians.items():
        click.echo(f"disk, {size(nbytes)}, {name}: {seconds * 1e3:.1f} ms ({nbytes / seconds / 1e9:.2f} GB/s)")
    return medians


@contextmanager
def trained(root: Path, name: str, transport: str, nbytes: int, options: Sequence[str]) -> Iterator[_Job]:
    """One shard with its own data directory and one worker, all processes of their own."""
    place = [] if name == "memory" else ["--data-dir", str(root / f"{transport}-{name}")]
    with ExitStack() as stack:
        cluster = stack.enter_context(running_cluster(options=[*place, *options] if place else []))
        worker = stack.enter_context(Child(ours.worker, 0, cluster.address, transport, nbytes, 1, {}))
        worker.ready()
        yield _Job(cluster, Crew([worker]))
    shutil.rmtree(root / f"{transport}-{name}", ignore_errors=True)


@dataclass
class _Job:
    cluster: BenchCluster
    crew: Crew

    def steps(self, count: int) -> list[float]:
        """Seconds of each of ``count`` steps."""
        return self.crew.run(ours.STEP, count, 0)["seconds"]


def steps(root: Path, transport: str, nbytes: int, rounds: int) -> dict[str, Any]:
    """Steps of the three kinds in turn; apart: the first half, while files are made that are overwritten later."""
    kinds = {"memory": [], "durable": ["--log-mb", "1024"], "durable, fsync": ["--log-mb", "1024", "--fsync"]}
    samples: dict[str, list[list[float]]] = {name: [] for name in kinds}
    with ExitStack() as stack:
        jobs = {
            name: stack.enter_context(trained(root, name, transport, nbytes, options))
            for name, options in kinds.items()
        }
        for _ in range(2 * rounds):
            for name, job in jobs.items():
                samples[name].append(job.steps(_TURN))
    found: dict[str, Any] = {}
    for part, chosen in (("at first", slice(0, rounds)), ("later", slice(rounds, None))):
        figures = {name: Figures.of(taken[chosen]) for name, taken in samples.items()}
        plain = figures["memory"].rounds
        for name, taken in figures.items():
            ratios = [a / b for a, b in zip(taken.rounds, plain, strict=True)]
            found[f"{name}, {part}"] = taken.to_json() | {"ratio": statistics.median(ratios)}
            click.echo(
                f"{transport}, {size(nbytes)}, {name}, {part}: {taken.median * 1e3:.1f} ms, "
                f"{statistics.median(ratios):.2f} × memory ({min(ratios):.2f} – {max(ratios):.2f})"
            )
    return found


def snapshots(root: Path, nbytes: int) -> dict[str, float]:
    """Steps with a snapshot every 5 seconds against steps without: what one snapshot costs, and the longest step."""
    seconds = 20.0
    kinds = {
        "without": ["--durability", "snapshot", "--snapshot-seconds", "1000000"],
        "with": ["--durability", "snapshot", "--snapshot-seconds", "5"],
    }
    taken: dict[str, list[float]] = {}
    for name, options in kinds.items():
        with trained(root, name, "grpc", nbytes, options) as job:
            job.steps(10)
            began, taken[name] = time.perf_counter(), []
            while time.perf_counter() - began < seconds:
                taken[name] += job.steps(_TURN)
    rate = {name: len(values) / sum(values) for name, values in taken.items()}
    made = seconds / 5
    lost_seconds = seconds * (1 - rate["with"] / rate["without"]) / made
    found = {
        "cost at one a minute": lost_seconds / 60,
        "longest step with": max(taken["with"]),
        "longest step without": max(taken["without"]),
        "median step": statistics.median(taken["without"]),
    }
    click.echo(
        f"one snapshot of {size(nbytes)} costs {lost_seconds:.2f} s of training, {lost_seconds / 0.6:.1f} % at one a "
        f"minute; longest step {max(taken['with']) * 1e3:.0f} ms with, {max(taken['without']) * 1e3:.0f} ms without"
    )
    return found


def restart(root: Path, nbytes: int) -> dict[str, float]:
    """From ``kill -9`` and the start of a shard with so much state until it serves."""
    with trained(root, "restart", ours.SHM, nbytes, []) as job:
        job.steps(6)
        began = time.perf_counter()
        job.cluster.kill_shard(0)
        job.cluster.start_shard(0)
        served = time.perf_counter() - began
    click.echo(f"a shard of {size(nbytes)} with 6 updates to replay, killed and started: serves after {served:.1f} s")
    return {"serves": served}


def takeover(root: Path, nbytes: int) -> dict[str, float]:
    """From ``kill -9`` of a shard with so much state until its standby holds the place; the lease is 5 s."""
    with trained(root, "first", ours.SHM, nbytes, ["--standby"]) as job:
        first = job.cluster.commands[0]
        place = first.index("--data-dir") + 1
        job.cluster.add([*first[:place], str(root / "second"), *first[place + 1 :]])
        job.steps(6)
        with CoordinatorClient(job.cluster.address) as client:

            def holder() -> Member | None:
                return client.get_status(5.0).view.live(Role.SHARD).get(0)

            time.sleep(_FOLLOW_SECONDS)
            before = holder()
            began = time.perf_counter()
            job.cluster.kill_shard(0)
            while (now := holder()) is None or now == before:
                time.sleep(0.02)
            passed = time.perf_counter() - began
    shutil.rmtree(root / "second", ignore_errors=True)
    click.echo(f"a shard of {size(nbytes)} with a standby, killed: the standby has its place after {passed:.1f} s")
    return {"takes the place": passed}


if __name__ == "__main__":
    main()
