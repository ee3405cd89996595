"""A step over a slow link with and without fewer bytes: ``python -m benchmarks.slow_link server`` and ``… worker``."""

from __future__ import annotations

import inspect
import json
import signal
import statistics
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track

import ps_worker
from benchmarks import report
from benchmarks.cluster import running_cluster
from benchmarks.ours import STEP, Flat
from benchmarks.rows import MB, size
from benchmarks.timing import Figures, Loop


@click.group()
def main() -> None:
    """Compare steps per second over a link that the two commands have between them."""


@main.command()
@click.option("--bind", required=True, help="Address on the server's side of the link.")
@click.option("--shards", type=click.IntRange(1), default=1)
def server(bind: str, shards: int) -> None:
    """Run coordinator and shards on an address, say where, and stay until Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with running_cluster(shards, bind=bind) as cluster:
        click.echo(f"coordinator on {cluster.address}")
        try:
            signal.pause()
        except KeyboardInterrupt:
            click.echo("ends")


@main.command()
@click.option("--coordinator", required=True, help="What the server said.")
@click.option("--wire", default="int8", show_default=True, help="Compared with no compression.")
@click.option("--nbytes", type=click.IntRange(4), default=4 * MB, show_default=True, help="Bytes of parameters.")
@click.option("--steps", type=click.IntRange(1), default=3, show_default=True, help="Steps of each per round.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Write JSON here.")
def worker(coordinator: str, wire: str, nbytes: int, steps: int, rounds: int, output: Path | None) -> None:
    """Step two models of the same size in turn, one per encoding, and print both rates and their ratio."""
    if "wire" not in inspect.signature(ps_worker.Cluster.optimizer).parameters:
        raise click.ClickException("this version of ps_worker has no wire=")
    torch.set_num_threads(1)
    samples: dict[str, list[list[float]]] = {"float32": [], wire: []}
    with ps_worker.connect(coordinator, device="cpu") as connection:
        loops = {name: _loop(connection, name, nbytes) for name in samples}
        for _ in track(range(rounds), description="rounds", disable=not Console().is_terminal):
            for name, loop in loops.items():
                samples[name].append(loop.run(STEP, steps, warm_up=1))
    figures = {name: Figures.of(taken) for name, taken in samples.items()}
    ratios = [plain / fewer for plain, fewer in zip(figures["float32"].rounds, figures[wire].rounds, strict=True)]
    for name, taken in figures.items():
        click.echo(f"{name}, {size(nbytes)}: {1 / taken.median:.3g} steps/s ({taken.median:.3g} s per step)")
    click.echo(f"{wire}: {statistics.median(ratios):.2f} times faster ({min(ratios):.2f} – {max(ratios):.2f})")
    if output:
        found = {"machine": report.machine(), "bytes": nbytes, "ratios": ratios}
        kept = {name: taken.to_json() for name, taken in figures.items()}
        output.write_text(json.dumps(found | {"seconds": kept}, indent=2) + "\n")


def _loop(connection: ps_worker.Cluster, name: str, nbytes: int) -> Loop:
    model = Flat(nbytes, 1)
    wire: dict[str, Any] = {"wire": None if name == "float32" else name}
    optimizer = connection.optimizer(torch.optim.SGD, model, name=name, lr=1e-6, **wire)
    model.set_gradients()
    return Loop({STEP: optimizer.step})


if __name__ == "__main__":
    main()
