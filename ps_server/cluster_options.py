"""The flags that say how a cluster keeps members and cuts variables, for ps-coordinator and ps-run alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from ps_server.coordinator.job_limits import JobLimits

CLUSTER_OPTIONS = (
    "partition",
    "partition_slices",
    "partition_bytes",
    "lease_seconds",
    "heartbeat_seconds",
    "max_model_bytes",
)


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags of ``CLUSTER_OPTIONS``; the command gets them under these names."""
    options = (
        click.option(
            "--partition",
            type=click.Choice(["balanced", "fixed", "min", "max"]),
            default="balanced",
            show_default=True,
            help="How variables are cut over the shards. balanced: by bytes, in as few slices as possible. fixed, min, "
            "max: as TensorFlow's FixedShards, MinSize and MaxSize partitioners.",
        ),
        click.option(
            "--partition-slices",
            type=click.IntRange(0),
            default=0,
            show_default=True,
            help="fixed: slices per variable (0: one per shard). min, max: at most that many (0: one per shard with "
            "min, any number with max).",
        ),
        click.option(
            "--partition-bytes",
            type=click.IntRange(1),
            default=256 << 10,
            show_default=True,
            help="min, max: size of a slice.",
        ),
        click.option(
            "--lease-seconds",
            type=click.FloatRange(0, min_open=True),
            default=20.0,
            show_default=True,
            help="A member that is silent this long is taken for dead: one that is frozen, or cut off. One whose "
            "process has ended is noticed within 5 seconds. A lease has to outlast the pauses of a busy machine.",
        ),
        click.option(
            "--heartbeat-seconds",
            type=click.FloatRange(0, min_open=True),
            default=1.0,
            show_default=True,
            help="How often members renew their lease.",
        ),
        click.option(
            "--max-model-bytes",
            type=click.IntRange(1),
            default=JobLimits().max_model_bytes,
            show_default="64 GB",
            help="Bytes of the values of all models together; a model that is declared beyond is refused.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def given_flags(context: click.Context) -> tuple[str, ...]:
    """Those of these flags that were given, by flag, environment or file, for the command line of a coordinator."""
    given = [name for name in CLUSTER_OPTIONS if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    return tuple(part for name in given for part in (f"--{name.replace('_', '-')}", str(context.params[name])))
