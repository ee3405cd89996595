"""The command psctl scale: sets how many workers and shards the job has, and waits until it has them."""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict

import click

from ps_protocol.cluster.scaling import ScaleProgress
from ps_server.cli.psctl.connection import connected, coordinator_option
from ps_server.cli.psctl.output import echo, note, output_option, print_result
from ps_server.settings import Finite

_INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended, as shells report it."""

_HELP = """Have the job have N workers, M shards, or both, while it trains.

The program that started the job starts and ends the processes: ps-run, RayCluster, or the --engine of the coordinator.
Workers with the highest ranks end first, after their step, and what they leased is trained by the others. Slices move
off a shard before it ends, and onto it after it has started.

The command prints what the job waits for, and returns when the job has these numbers. After --timeout or Ctrl-C the job
still scales to them: psctl status shows them, and the same command waits again. The number of workers can change in a
job that began with --workers MIN:MAX, or 0.

\b
    ps-run --workers 2:8 train.py
    psctl scale --workers 6 --shards 3
"""


@click.command(help=_HELP)
@click.option("--workers", type=click.IntRange(0), metavar="N", help="Number of workers that the job shall have.")
@click.option("--shards", type=click.IntRange(1), metavar="M", help="Number of shards that shall store the models.")
@click.option(
    "--timeout",
    type=Finite(0.0),
    metavar="SECONDS",
    help="Longest time to wait.  [default: no limit]",
)
@coordinator_option
@output_option()
def scale(coordinator: str, workers: int | None, shards: int | None, timeout: float | None, as_json: bool) -> None:
    """Start or end workers and shards."""
    if workers is None and shards is None:
        raise click.UsageError("give --workers N, --shards M, or both")
    last = ScaleProgress("")

    def show(progress: ScaleProgress) -> None:
        nonlocal last
        last = progress
        if not last.done:
            echo(last.text, err=as_json)

    with connected(coordinator) as job:
        try:
            size = job.scale(workers=workers, shards=shards, timeout_seconds=timeout, on_progress=show)
        except KeyboardInterrupt:
            note(f"stopped: {last.text}. It stays wanted; the same command waits on", logging.WARNING)
            sys.exit(_INTERRUPTED)
    print_result(asdict(size), last.text, as_json)
