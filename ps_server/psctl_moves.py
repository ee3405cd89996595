"""The commands psctl move and psctl drain: which slices move, and how far that is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click
from rich.filesize import decimal

from ps_protocol.client.coordinator import CoordinatorClient, MoveStream
from ps_protocol.view import MoveProgress
from ps_server.psctl_options import connected, coordinator_option

MB = 1 << 20

_INTERRUPTED = 130
"""What a shell says of a command that Ctrl-C ended."""

batch_option: Callable[[Callable[..., Any]], Callable[..., Any]] = click.option(
    "--batch-mb",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="How much moves while training holds still once: less makes shorter pauses, and more of them.",
)


_MOVE = """Move slices and tables of the models between shards, while the job trains.

Training holds still for a moment per batch, and no push is lost. Slices are not cut anew: a shard gets whole ones, up
to its share, and as many buckets of each table as the others have. Ctrl-C ends it after the batch under way; what was
moved stays, and the same command goes on.

A shard more in a running job, and one variable or table on a shard:

\b
    ps-server --shard 2 --add --coordinator HOST:PORT
    psctl move --to 2
    psctl move --model model --variable embedding.weight --to 2
"""

_DRAIN = """Move everything off the shards N, while the job trains; then they may be stopped.

What they hold goes to those of the others that hold least. A drained shard is spare: nobody waits for it, new models
are not placed on it, and psctl move --to uses it again. Ctrl-C ends it after the batch under way; what was moved stays,
and the same command goes on.

Another machine in the place of shard 1:

\b
    ps-server --shard 2 --add --coordinator HOST:PORT
    psctl drain 1 --to 2
"""


@click.command(help=_MOVE)
@click.option("--to", multiple=True, type=click.IntRange(0), metavar="N", help="Shard that gets its share; repeatable.")
@click.option("--balance", is_flag=True, help="Balance anew the shards that hold something now.")
@click.option("--model", help="The model of --variable.")
@click.option("--variable", help="Move only this variable or table, to the one shard in --to.")
@batch_option
@coordinator_option
def move(
    coordinator: str, to: tuple[int, ...], balance: bool, model: str | None, variable: str | None, batch_mb: int
) -> None:
    """Move slices to shards, or balance them anew."""
    if (model is None) != (variable is None):
        raise click.UsageError("--model and --variable go together")
    if model is not None and (balance or len(to) != 1):
        raise click.UsageError("one variable moves to one shard: give --to once, and not --balance")
    if not to and not balance:
        raise click.UsageError("what is to move? Give --to N, or --balance")
    _run(coordinator, lambda client: client.move(to, (), model or "", variable or "", batch_mb * MB))


@click.command(help=_DRAIN)
@click.argument("shards", nargs=-1, required=True, type=click.IntRange(0), metavar="N...")
@click.option("--to", multiple=True, type=click.IntRange(0), metavar="M", help="Use shard M from now on, too.")
@batch_option
@coordinator_option
def drain(coordinator: str, shards: tuple[int, ...], to: tuple[int, ...], batch_mb: int) -> None:
    """Move everything off some shards."""
    _run(coordinator, lambda client: client.move(to, shards, batch_bytes=batch_mb * MB))
    one = len(shards) == 1
    named = f"shard{'' if one else 's'} {', '.join(map(str, shards))}"
    click.echo(f"{named} {'holds' if one else 'hold'} nothing any more and may be stopped")


def _run(coordinator: str, ask: Callable[[CoordinatorClient], MoveStream]) -> None:
    """Show the progress of a move until its end, or until Ctrl-C."""
    last, longest = MoveProgress(), 0.0
    with connected(coordinator) as client:
        stream = ask(client)
        try:
            for last in stream:
                longest = max(longest, last.pause_seconds)
                if last.batches:
                    click.echo(
                        f"{_moved(last)} of {decimal(last.total_bytes)}; "
                        f"training held still for {last.pause_seconds:.2f} s"
                    )
        except KeyboardInterrupt:
            click.echo(
                f"stopped: {_moved(last)} of {decimal(last.total_bytes)}, and the batch under way may follow; the "
                "same command goes on",
                err=True,
            )
            sys.exit(_INTERRUPTED)
        finally:
            stream.cancel()
    click.echo(f"{_moved(last)}; longest pause {longest:.2f} s" if last.batches else "nothing had to move")


def _moved(progress: MoveProgress) -> str:
    batches = f"{progress.batches} batch{'' if progress.batches == 1 else 'es'}"
    return f"moved {decimal(progress.moved_bytes)} in {batches}"
