"""The settings and options of checkpoints, shared by several commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from ps_protocol.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Where checkpoints of the job are written, and when."""

    #: The same path for all shards; None: no checkpoints.
    directory: Path | None = None
    #: Time between two; None: only on request, and at the end.
    seconds: float | None = None
    #: How many are kept, besides those that they build on.
    keep: int = 3
    #: One of so many holds all rows of tables; the others hold those changed since the one before.
    full_every: int = 1
    #: The checkpoint that the job began with: it stays while its coordinator may read it again.
    restored: Path | None = None


def checkpoint_config(directory: Path | None, seconds: float | None, keep: int, full_every: int) -> CheckpointConfig:
    """The settings, with an absolute directory. Raises ConfigError for options that have no effect without one."""
    default = CheckpointConfig()
    if directory is None:
        for flag, value, unset in (
            ("--checkpoint-seconds", seconds, default.seconds),
            ("--checkpoint-keep", keep, default.keep),
            ("--checkpoint-full-every", full_every, default.full_every),
        ):
            if value != unset:
                raise ConfigError(
                    f"{flag} without --checkpoint-dir makes no checkpoints",
                    actual=f"{flag} {value:g}",
                    remedy=f"give --checkpoint-dir as well, or leave {flag} out",
                )
    return CheckpointConfig(None if directory is None else directory.absolute(), seconds, keep, full_every)


_OPTIONS = (
    click.option(
        "--checkpoint-dir",
        type=click.Path(file_okay=False, path_type=Path),
        show_default="no checkpoints",
        help="Folder for checkpoints of the whole job, which must have the same path for all shards. A checkpoint is "
        "made on psctl checkpoint, at the interval, when the job is finished, and when the coordinator is stopped.",
    ),
    click.option(
        "--checkpoint-seconds",
        type=click.FloatRange(1),
        show_default="no interval",
        help="Interval of checkpoints.",
    ),
    click.option("--checkpoint-keep", type=click.IntRange(1), default=3, help="Number of checkpoints that are kept."),
    click.option(
        "--checkpoint-full-every",
        type=click.IntRange(1),
        default=1,
        help="One of this many checkpoints holds all rows of tables. The others hold the rows changed since the one "
        "before, which is then kept as well.",
    ),
    click.option(
        "--restore",
        metavar="FOLDER|latest",
        show_default="no checkpoint",
        help="Take the values of models from this checkpoint instead of the first worker. latest: the newest one in "
        "--checkpoint-dir, if there is one. The number of shards may differ. Models that are already part of the job "
        "are not changed.",
    ),
)


def checkpoint_options(command: F) -> F:
    """Add the options to a click command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def flags_of(config: CheckpointConfig, restore: str | None) -> list[str]:
    """The same settings as options of another program."""
    flags = [] if config.directory is None else ["--checkpoint-dir", str(config.directory)]
    flags += [] if config.seconds is None else ["--checkpoint-seconds", str(config.seconds)]
    flags += [] if config.directory is None else ["--checkpoint-keep", str(config.keep)]
    flags += [] if config.directory is None else ["--checkpoint-full-every", str(config.full_every)]
    return [*flags, *(["--restore", restore] if restore else [])]
