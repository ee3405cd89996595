"""The commands psctl move and psctl drain, with the progress of the move."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click
from rich.filesize import decimal

from ps_protocol.client.admin import AdminClient, MoveSummary
from ps_protocol.cluster.view import MoveProgress
from ps_server.cli.psctl.connection import connected, coordinator_option
from ps_server.cli.psctl.output import echo, note, output_option, print_result

MB = 1 << 20

_INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended, as shells report it."""

batch_option: Callable[[Callable[..., Any]], Callable[..., Any]] = click.option(
    "--batch-mb",
    type=click.IntRange(0),
    default=0,
    show_default="as much as a pause of 0.12 s allows",
    help="Size of a batch. Training pauses once per batch: smaller batches make shorter pauses, and more of them.",
)


_MOVE = """Move slices and tables of the models between shards, while the job trains.

Training pauses for a moment per batch, and no push is lost. Slices are not split: a shard receives whole slices, up to
its share, and as many buckets of each table as the other shards have. Ctrl-C ends the command after the current batch.
What was moved stays moved; run the same command again to move the rest.

To add a shard to a running job, and to move one variable or table to it:

\b
    ps-server --shard 2 --add --coordinator HOST:PORT
    psctl move --to 2
    psctl move --model model --variable embedding.weight --to 2
"""

_DRAIN = """Move everything off the shards N, while the job trains. Then they can be stopped.

Their slices and buckets move to the other shards with the fewest bytes. A drained shard is spare: the job does not wait
for it, new models are not placed on it, and psctl move --to uses it again. Ctrl-C ends the command after the current
batch. What was moved stays moved; run the same command again to move the rest.

To replace shard 1 by a shard on another machine:

\b
    ps-server --shard 2 --add --coordinator HOST:PORT
    psctl drain 1 --to 2
"""


@click.command(help=_MOVE)
@click.option(
    "--to", multiple=True, type=click.IntRange(0), metavar="N", help="Shard that receives its share; repeatable."
)
@click.option("--balance", is_flag=True, help="Balance the shards that have slices or buckets now.")
@click.option("--model", help="Name of the model of --variable.")
@click.option("--variable", help="Move only this variable or table, to the shard in --to.")
@batch_option
@coordinator_option
@output_option()
def move(
    coordinator: str,
    to: tuple[int, ...],
    balance: bool,
    model: str | None,
    variable: str | None,
    batch_mb: int,
    as_json: bool,
) -> None:
    """Move slices to shards, or balance them."""
    if (model is None) != (variable is None):
        raise click.UsageError("--model and --variable need each other")
    if model is not None and (balance or len(to) != 1):
        raise click.UsageError("--variable needs exactly one --to, and no --balance")
    if not to and not balance:
        raise click.UsageError("give --to N, or --balance")
    facts, text = _run(
        coordinator,
        lambda job, show: job.move(
            to, model=model or "", variable=variable or "", batch_bytes=batch_mb * MB, on_progress=show
        ),
        as_json,
    )
    print_result(facts, text, as_json)


@click.command(help=_DRAIN)
@click.argument("shards", nargs=-1, required=True, type=click.IntRange(0), metavar="N...")
@click.option(
    "--to", multiple=True, type=click.IntRange(0), metavar="M", help="Also use shard M from now on; repeatable."
)
@batch_option
@coordinator_option
@output_option()
def drain(coordinator: str, shards: tuple[int, ...], to: tuple[int, ...], batch_mb: int, as_json: bool) -> None:
    """Move everything off some shards."""
    facts, text = _run(
        coordinator,
        lambda job, show: job.drain(shards, to=to, batch_bytes=batch_mb * MB, on_progress=show),
        as_json,
    )
    one = len(shards) == 1
    named = f"shard{'' if one else 's'} {', '.join(map(str, shards))}"
    text = f"{text}\n{named} {'is' if one else 'are'} empty and can be stopped"
    print_result({**facts, "drained": sorted(shards)}, text, as_json)


def _run(
    coordinator: str, move: Callable[[AdminClient, Callable[[MoveProgress], None]], MoveSummary], as_json: bool
) -> tuple[dict[str, object], str]:
    """Show the progress of a move until its end, or until Ctrl-C; with ``as_json`` on stderr. Returns what it did."""
    last = MoveProgress()

    def show(progress: MoveProgress) -> None:
        nonlocal last
        last = progress
        if last.batches:
            echo(
                f"{_moved(last)} of {decimal(last.total_bytes)}; training paused for {last.pause_seconds:.2f} s",
                err=as_json,
            )

    with connected(coordinator) as job:
        try:
            done = move(job, show)
        except KeyboardInterrupt:
            note(
                f"stopped: {_moved(last)} of {decimal(last.total_bytes)}; the current batch may still complete. "
                "Run the same command again to move the rest",
                logging.WARNING,
            )
            sys.exit(_INTERRUPTED)
    text = (
        f"{_moved(done)}; longest pause {done.longest_pause_seconds:.2f} s" if done.batches else "nothing had to move"
    )
    return asdict(done), text


def _moved(progress: MoveProgress | MoveSummary) -> str:
    batches = f"{progress.batches} batch{'' if progress.batches == 1 else 'es'}"
    return f"moved {decimal(progress.moved_bytes)} in {batches}"
