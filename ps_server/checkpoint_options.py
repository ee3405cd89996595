"""When and where a job is written to disk as a whole: the settings, and the same options for every command."""

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
    """Where checkpoints of the job go, and when they are made."""

    #: As the shards see it, too; None: no checkpoints.
    directory: Path | None = None
    #: Time between two; None: only when asked, and at the end.
    seconds: float | None = None
    #: How many are kept, beside those they go on from.
    keep: int = 3
    #: Of so many one holds all rows of tables; the others those touched since the one before.
    full_every: int = 1


def checkpoint_config(directory: Path | None, seconds: float | None, keep: int, full_every: int) -> CheckpointConfig:
    """The settings, with a directory that means the same to every process. Raises ConfigError for those that mean
    nothing without a directory.
    """
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
                    remedy=f"give --checkpoint-dir, too, or leave {flag} out",
                )
    return CheckpointConfig(None if directory is None else directory.absolute(), seconds, keep, full_every)


_OPTIONS = (
    click.option(
        "--checkpoint-dir",
        type=click.Path(file_okay=False, path_type=Path),
        show_default="no checkpoints",
        help="Folder for checkpoints of the whole job, which all shards must see under the same path. One is made when "
        "psctl checkpoint asks, at the interval, when the job is finished, and when it is told to stop.",
    ),
    click.option(
        "--checkpoint-seconds",
        type=click.FloatRange(1),
        show_default="no interval",
        help="Time between checkpoints.",
    ),
    click.option("--checkpoint-keep", type=click.IntRange(1), default=3, help="How many checkpoints are kept."),
    click.option(
        "--checkpoint-full-every",
        type=click.IntRange(1),
        default=1,
        help="Of so many checkpoints one holds all rows of tables; the others those touched since the one before, "
        "which is then kept, too.",
    ),
    click.option(
        "--restore",
        metavar="FOLDER|latest",
        show_default="begin anew",
        help="Take the values of models from this checkpoint instead of the first worker; latest: the newest in "
        "--checkpoint-dir, if there is one. The number of shards may be another. Models the job has placed already are "
        "not touched.",
    ),
)


def checkpoint_options(command: F) -> F:
    """Add the options to a click command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def flags_of(config: CheckpointConfig, restore: str | None) -> list[str]:
    """The options that say the same to another program."""
    flags = [] if config.directory is None else ["--checkpoint-dir", str(config.directory)]
    flags += [] if config.seconds is None else ["--checkpoint-seconds", str(config.seconds)]
    flags += [] if config.directory is None else ["--checkpoint-keep", str(config.keep)]
    flags += [] if config.directory is None else ["--checkpoint-full-every", str(config.full_every)]
    return [*flags, *(["--restore", restore] if restore else [])]
