"""The options of leases, partitioning, limits and moves, shared by ps-coordinator and ps-run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from ps_protocol.flags import flags

CLUSTER_OPTIONS = (
    "partition",
    "partition_slices",
    "partition_bytes",
    "lease_seconds",
    "heartbeat_seconds",
    "rebalance",
)


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags of ``CLUSTER_OPTIONS``; the command gets them under these names."""
    options = (
        click.option(
            "--partition",
            type=click.Choice(["balanced", "fixed", "min", "max"]),
            default="balanced",
            show_default=True,
            help="How variables are partitioned over the shards. balanced: by bytes, in as few slices as possible. "
            "fixed, min, max: as TensorFlow's FixedShards, MinSize and MaxSize partitioners.",
        ),
        click.option(
            "--partition-slices",
            type=click.IntRange(0),
            default=0,
            show_default=True,
            help="fixed: slices per variable (0: one per shard). min, max: the most slices per variable (0: one per "
            "shard with min, no limit with max).",
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
            help="A member without a heartbeat for this long counts as dead, for example one that hangs or is cut off "
            "from the network. The end of a process is noticed within 5 seconds. Use more than the longest pause of a "
            "busy machine.",
        ),
        click.option(
            "--heartbeat-seconds",
            type=click.FloatRange(0, min_open=True),
            default=1.0,
            show_default=True,
            help="Interval at which members renew their lease. More than 300 members do so less often, after a quarter "
            "of the lease at most.",
        ),
        click.option(
            "--rebalance",
            is_flag=True,
            help="Move slices and rows by itself from a shard that has 1.5 times the mean traffic for 30 s to the one "
            "that has least: 6 times an hour at most, and no more where it does not help.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def given_flags(context: click.Context) -> tuple[str, ...]:
    """The options among these that were set, on the command line, in the environment or a file, for a coordinator."""
    given = [name for name in CLUSTER_OPTIONS if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    return tuple(flags({name: context.params[name] for name in given}))
