"""The command psctl scale: as many workers and shards as asked for, with what the job waits for until it has them."""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict

import click

from ps_protocol.cluster.scaling import ScaleProgress
from ps_server.cli.psctl.connection import connected, coordinator_option
from ps_server.cli.psctl.output import note, output_option, say, tell

_INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended, as shells report it."""

_HELP = """Have the job have N workers, M shards, or both, while it trains.

Whoever started the job starts and ends the processes: ps-run, RayCluster, or the --engine of the coordinator. Workers
with the highest ranks end first, after their step, and what they leased is trained by the others. Slices move off a
shard before it ends, and onto it after it has started.

The command says what the job waits for, and returns when it has what was asked for. After --timeout, or Ctrl-C, that
stays wanted all the same: psctl status shows it, and the same command waits on. The number of workers can change in
a job that began with --workers MIN:MAX, or 0.

\b
    ps-run --workers 2:8 train.py
    psctl scale --workers 6 --shards 3
"""


@click.command(help=_HELP)
@click.option("--workers", type=click.IntRange(0), metavar="N", help="How many workers the job is to have.")
@click.option("--shards", type=click.IntRange(1), metavar="M", help="How many shards are to hold the models.")
@click.option(
    "--timeout",
    type=click.FloatRange(0.0),
    metavar="SECONDS",
    help="How long to wait.  [default: as long as it takes]",
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
            say(last.text, err=as_json)

    with connected(coordinator) as job:
        try:
            size = job.scale(workers=workers, shards=shards, timeout_seconds=timeout, on_progress=show)
        except KeyboardInterrupt:
            note(f"stopped: {last.text}. It stays wanted; the same command waits on", logging.WARNING)
            sys.exit(_INTERRUPTED)
    tell(asdict(size), last.text, as_json)
