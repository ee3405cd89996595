"""The settings and options of what a shard keeps on disk, shared by several commands."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import click

from ps_protocol.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


LOG_BYTES = 2 << 30
"""Default; a shard with larger records takes more."""


class Durability(enum.Enum):
    """What of a shard outlives its process."""

    #: Nothing.
    MEMORY = "memory"
    #: The state of some seconds ago.
    SNAPSHOT = "snapshot"
    #: Every push that was acknowledged.
    DURABLE = "durable"


@dataclass(frozen=True, slots=True)
class SnapshotRule:
    """A snapshot is due when one of these has gone by since the last."""

    seconds: float = 60.0
    #: Size of the log on disk: snapshots begin early enough for it, unless the log grows faster than they are made.
    log_bytes: int = LOG_BYTES
    #: A model whose records need more is refused.
    strict: bool = False
    log_records: int = 50_000


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """What a shard keeps on disk, and where."""

    durability: Durability = Durability.MEMORY
    #: Needed unless durability is "memory".
    data_dir: Path | None = None
    #: An acknowledged push also survives a power failure.
    fsync: bool = False
    snapshots: SnapshotRule = field(default_factory=SnapshotRule)


_OPTIONS = (
    click.option(
        "--data-dir",
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder for logs and snapshots; each shard uses a subfolder. Without it, state is in memory only.",
    ),
    click.option(
        "--durability",
        type=click.Choice([durability.value for durability in Durability]),
        help="What survives the process. memory: nothing. snapshot: the state of at most --snapshot-seconds ago. "
        "durable: every acknowledged push.  [default: durable with --data-dir, else memory]",
    ),
    click.option("--fsync", is_flag=True, help="durable: acknowledged pushes also survive a power failure."),
    click.option(
        "--snapshot-seconds",
        type=click.FloatRange(0, min_open=True),
        default=60.0,
        help="Interval of snapshots. With durable, it only bounds the time of a restart.",
    ),
    click.option(
        "--log-mb",
        type=click.IntRange(1),
        metavar="MB",
        help="durable: disk space for the log. A snapshot is also taken before it is full. A model whose updates need "
        f"more is refused.  [default: {LOG_BYTES >> 20}, or what the largest update needs]",
    ),
)


def storage_options(command: F) -> F:
    """Add the options to a click command; their values are the arguments of ``storage_config``."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def storage_config(
    data_dir: Path | None, durability: str | None, fsync: bool, snapshot_seconds: float, log_mb: int | None
) -> StorageConfig:
    """Raises ConfigError for options that contradict each other."""
    chosen = Durability(durability) if durability else Durability.DURABLE if data_dir else Durability.MEMORY
    if chosen is not Durability.MEMORY and data_dir is None:
        raise ConfigError(
            f"--durability {chosen.value} needs a data directory",
            remedy="give --data-dir, or --durability memory",
        )
    if fsync and chosen is not Durability.DURABLE:
        raise ConfigError(
            "--fsync is for --durability durable", actual=f"--durability {chosen.value}", remedy="leave --fsync out"
        )
    log_bytes = LOG_BYTES if log_mb is None else log_mb << 20
    return StorageConfig(chosen, data_dir, fsync, SnapshotRule(snapshot_seconds, log_bytes, strict=log_mb is not None))
