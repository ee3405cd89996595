"""``ps-server``: one shard as a process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from ps_protocol.address import split_address
from ps_protocol.errors import ConfigError
from ps_protocol.tf_config import TfConfig
from ps_server import serving
from ps_server.cli import clean_errors, configure_logging, exit_option, run_program, server_options
from ps_server.failpoints import ENVIRONMENT, Failpoints
from ps_server.shard.life import ShardConfig, serve
from ps_server.shard.malloc import use_one_arena
from ps_server.shard.replication import Acknowledge
from ps_server.shard.side_channels import SideChannelConfig
from ps_server.shard.watchdog import EXIT_STUCK, STUCK_SECONDS
from ps_server.storage_options import Durability, StorageConfig, storage_config, storage_options

__all__ = ["ShardConfig", "main", "serve"]


@click.command(context_settings={"auto_envvar_prefix": "PS_SERVER", "show_default": True})
@click.option("--shard", type=click.IntRange(0), help="Number of this shard, from 0. Needed, except under TF_CONFIG.")
@click.option(
    "--coordinator",
    envvar=["PS_SERVER_COORDINATOR", "PS_COORDINATOR"],
    help="Coordinator's host:port. Needed, except under a TF_CONFIG with a chief.",
)
@server_options(default_port=0)
@click.option("--advertise", default="", help="host:port that workers dial, when it is not where this shard listens.")
@click.option(
    "--bulk-ports",
    default="0",
    metavar="PORT|FIRST-LAST|off",
    help="TCP port for tensors beside gRPC: the first free one is taken; 0 is any; off: everything goes over gRPC.",
)
@click.option("--shm/--no-shm", default=True, help="Share memory with workers on the same host.")
@storage_options
@click.option(
    "--standby",
    is_flag=True,
    help="Follow the log of the process that serves this shard, if one does, and take its place when it is lost. Start "
    "both alike, each with a --data-dir of its own.",
)
@click.option(
    "--acknowledge",
    type=click.Choice([each.value for each in Acknowledge]),
    default=Acknowledge.BEFORE.value,
    help="When a push is acknowledged: before its standby has it, or after. With before, what the standby lacks when "
    "this process is lost is lost, too.",
)
@click.option(
    "--add",
    is_flag=True,
    help="Add this shard to the running job when its number is a new one. It holds nothing at first: psctl move --to "
    "gives it slices. Not needed again when it is started again.",
)
@click.option(
    "--take-over",
    is_flag=True,
    help="Take the place from a process that holds it and may live; that one is fenced. Without it a process whose "
    "place is held waits for one lease, and is refused if the holder lives.",
)
@click.option(
    "--max-model-bytes",
    type=click.IntRange(0),
    default=0,
    show_default="the memory of the machine",
    help="Bytes of the values of all models that this shard takes.",
)
@click.option(
    "--answer-mb",
    type=click.IntRange(0),
    default=0,
    show_default="a quarter of the memory of the machine",
    metavar="MB",
    help="Memory of answers on their way to who asked for rows or parameters; one client gets half of it at most.",
)
@click.option(
    "--checkpoint-dir",
    "checkpoint_dirs",
    type=click.Path(file_okay=False, path_type=Path),
    multiple=True,
    show_default="no checkpoints",
    help="Folder that checkpoints are written to and read from, the same as ps-coordinator's; for --restore from "
    "elsewhere give that one, too. Others are refused, whoever asks.",
)
@click.option("--threads", type=click.IntRange(0), default=0, help="Threads of the optimizer; 0: half of the cores.")
@click.option(
    "--stuck-seconds",
    type=click.FloatRange(0),
    default=STUCK_SECONDS,
    help="A piece of work that takes longer than this, and a second for each 10 MB it touches, ends the process with "
    f"code {EXIT_STUCK}, so that a restart or a standby takes its place. 0: never.",
)
@exit_option
@click.option(
    "--connect-timeout",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    help="Seconds to wait for the coordinator.",
)
def main(
    shard: int | None,
    coordinator: str | None,
    bind: str,
    port: int,
    log_level: str,
    ready_file: Path | None,
    advertise: str,
    bulk_ports: str,
    shm: bool,
    threads: int,
    connect_timeout: float,
    standby: bool,
    acknowledge: str,
    add: bool,
    stuck_seconds: float,
    max_model_bytes: int,
    take_over: bool,
    answer_mb: int,
    checkpoint_dirs: tuple[Path, ...],
    exit_when_finished: bool,
    **storage: Any,
) -> None:
    """Run one shard: it holds its slices of every model, and applies the gradients pushed to it.

    The shard joins the coordinator, receives its slices when a worker declares a model, and keeps them in memory; with
    --data-dir on disk, too: started again with the same directory it goes on where it was, however it ended. Stop it
    with Ctrl-C or SIGTERM.

    \b
    Example, a cluster of one shard by hand:
      ps-coordinator --shards 1 --workers 2
      ps-server --shard 0 --coordinator 127.0.0.1:7000 --data-dir data
    """  # noqa: D301 -- click looks for the character
    with clean_errors():
        use_one_arena()
        configure_logging(log_level)
        if text := os.environ.get("TF_CONFIG"):
            shard, coordinator, bind, port = _from_tf_config(TfConfig.parse(text), shard, coordinator, bind, port)
            # An engine that started the tasks may wait for them all.
            source = click.get_current_context().get_parameter_source("exit_when_finished")
            exit_when_finished = exit_when_finished or source is ParameterSource.DEFAULT
        if shard is None or coordinator is None:
            missing = "--shard" if shard is None else "--coordinator"
            raise ConfigError(f"{missing} is missing", remedy=f"give {missing}, or set TF_CONFIG; see ps-server --help")
        split_address(coordinator, setting="--coordinator, PS_COORDINATOR or TF_CONFIG")
        if advertise:
            split_address(advertise, "this shard", "--advertise")
        side_channels = SideChannelConfig(bind, parse_ports(bulk_ports), shm)
        kept = storage_config(**storage)
        if standby or acknowledge == Acknowledge.AFTER.value:
            _check_followable(kept)
        config = ShardConfig(
            shard,
            coordinator,
            bind,
            port,
            advertise,
            threads,
            connect_timeout,
            ready_file,
            side_channels,
            kept,
            Failpoints.parse(os.environ.get(ENVIRONMENT, "")),
            standby,
            Acknowledge(acknowledge),
            add,
            stuck_seconds,
            max_model_bytes,
            take_over,
            answer_mb << 20,
            checkpoint_dirs,
            exit_when_finished,
        )
        serving.run(lambda stop: serve(config, stop))


def _check_followable(storage: StorageConfig) -> None:
    """Raises ConfigError for a shard that keeps no log."""
    if storage.durability is not Durability.DURABLE:
        raise ConfigError(
            "a standby follows a log on disk, and keeps one",
            expected="--data-dir, and --durability durable",
            actual=f"--durability {storage.durability.value}",
            remedy="give --data-dir, or leave out --standby and --acknowledge",
        )


def parse_ports(text: str) -> Sequence[int]:
    """Ports of ``--bulk-ports``, none for "off". Raises ConfigError."""
    if text == "off":
        return ()
    first, dash, last = text.partition("-")
    try:
        ports = range(int(first), int(last if dash else first) + 1)
    except ValueError:
        ports = range(0)
    if not ports or ports[-1] > 65535 or ports[0] < 0:
        raise ConfigError(
            "--bulk-ports is no port, no range of ports, and not off", expected="7200, 7200-7299, 0 or off", actual=text
        )
    return ports


def _from_tf_config(
    tf_config: TfConfig, shard: int | None, coordinator: str | None, bind: str, port: int
) -> tuple[int, str | None, str, int]:
    """What flags leave open, from TF_CONFIG: the number, the coordinator, and where to listen."""
    if shard is None and tf_config.task_type != "ps":
        raise ConfigError(
            f"ps-server runs the tasks of type ps; this TF_CONFIG says {tf_config.task_type} {tf_config.task_index}",
            remedy="run ps-coordinator on the chief, the training script on workers, or give --shard",
        )
    number = tf_config.task_index if shard is None else shard
    host, _, listed = tf_config.shard_address(number).rpartition(":")
    default = click.get_current_context().get_parameter_source
    if default("bind") is ParameterSource.DEFAULT:
        bind = host.strip("[]")
    if default("port") is ParameterSource.DEFAULT:
        port = int(listed)
    return number, coordinator or tf_config.coordinator_address, bind, port


def program() -> NoReturn:
    """The process of ps-server."""
    run_program(main)


if __name__ == "__main__":
    program()
