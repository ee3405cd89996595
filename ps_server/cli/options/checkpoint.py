"""The settings of checkpoints, shared by ps-coordinator and ps-run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ps_protocol.errors import ConfigError
from ps_server.settings import Finite, configured, setting, settings_of

_STEP_DIGITS = 18


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Where checkpoints of the job are written, and when."""

    directory: Path | None = setting(
        None,
        "Folder for checkpoints of the whole job, which must have the same path for all shards. A checkpoint is "
        "made on psctl checkpoint, at the interval, when the job is finished, and when the coordinator is stopped.",
        name="checkpoint_dir",
        show_default="no checkpoints",
    )
    seconds: float | None = setting(
        None, "Interval of checkpoints.", Finite(1), name="checkpoint_seconds", show_default="no interval"
    )
    keep: int = setting(3, "Number of checkpoints that are kept.", name="checkpoint_keep")
    full_every: int = setting(
        1,
        "One of this many checkpoints holds all rows of tables. The others hold the rows changed since the one "
        "before, which is then kept as well.",
        name="checkpoint_full_every",
    )
    restore: str | None = setting(
        None,
        "Take the values of models from this checkpoint instead of the first worker. latest: the newest one in "
        "--checkpoint-dir, if there is one. step=N: the one there whose models had N updates (psctl checkpoints). The "
        "number of shards may differ. Models that are already part of the job are not changed.",
        metavar="FOLDER|latest|step=N",
        show_default="no checkpoint",
    )
    #: The checkpoint that the job began with: it stays while its coordinator may read it again.
    restored: Path | None = None


def checkpoint_config(options: Mapping[str, Any]) -> CheckpointConfig:
    """The settings, with an absolute directory.

    Raises ConfigError for options that have no effect without one, and for a step that is no number.
    """
    config = configured(CheckpointConfig, options)
    if config.restore is not None:
        step_in(config.restore)
    if config.directory is not None:
        return replace(config, directory=config.directory.absolute())
    for name, source in settings_of(CheckpointConfig).items():
        value, flag = options.get(name, source.default), f"--{name.replace('_', '-')}"
        if value != source.default and name != "restore":
            raise ConfigError(
                f"{flag} without --checkpoint-dir makes no checkpoints",
                actual=f"{flag} {value:g}",
                remedy=f"give --checkpoint-dir as well, or leave {flag} out",
            )
    return config


def step_in(text: str) -> int | None:
    """N of ``step=N``; None for anything else, such as a folder. Raises ConfigError for a step that is no number."""
    name, sign, number = text.partition("=")
    if not sign or name != "step":
        return None
    if not (number.isascii() and number.isdigit() and len(number) <= _STEP_DIGITS):
        raise ConfigError(
            "a step of a checkpoint is a number",
            expected="such as step=1200",
            actual=text[:100],
            remedy="psctl checkpoints FOLDER lists the steps; ./step=... is a folder of that name",
        )
    return int(number)
