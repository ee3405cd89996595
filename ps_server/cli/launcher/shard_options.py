"""Options of ps-run for the processes of its shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

_threads = click.option(
    "--threads",
    type=click.IntRange(1),
    help="Number of torch threads of each shard. OMP_NUM_THREADS sets that of workers.",
)

_fork = click.option(
    "--fork-shards/--no-fork-shards",
    default=True,
    show_default=True,
    help="Fork the shards of this machine from one process that has imported their modules; without, each shard "
    "imports them itself.",
)


def shard_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --threads and --fork-shards: ``threads`` (int or None) and ``fork_shards`` (bool)."""
    return _threads(_fork(command))
