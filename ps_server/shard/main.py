"""``ps-server``: one shard as a process."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from ps_protocol.cluster.address import split_address
from ps_protocol.cluster.tf_config import TfConfig
from ps_protocol.errors import ConfigError
from ps_protocol.logs import LogFormat, configure_logging, describe_process
from ps_protocol.model.registered_optimizers import ENVIRONMENT as OPTIMIZERS_VARIABLE
from ps_protocol.model.registered_optimizers import load_entry_points, load_modules, named_modules
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_protocol.security.settings import SecuritySettings
from ps_server.checkpoint.folder.files import check_writable
from ps_server.cli.options.common import (
    OWN_DESCRIPTORS,
    check_descriptors,
    check_ready_file,
    clean_errors,
    exit_option,
    run_program,
    server_options,
)
from ps_server.cli.options.limits import byte_limit_options, shard_limit_options
from ps_server.cli.options.security import server_security_options
from ps_server.cli.options.storage import Durability, StorageConfig, storage_config, storage_options
from ps_server.entry import ended_by_ctrl_c
from ps_server.failpoints import ENVIRONMENT, Failpoints
from ps_server.limits import ServerLimits
from ps_server.serving import grpc_server
from ps_server.serving.metrics import MetricsConfig, metrics_option, parse_port
from ps_server.shard.config import Acknowledge, ShardConfig, SideChannelConfig
from ps_server.shard.execution.watchdog import EXIT_STUCK, STUCK_SECONDS

logger = logging.getLogger(__name__)

_M_ARENA_MAX, _M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -8, -3, -1
"""Options of glibc's mallopt."""

_MAPPED_FROM_BYTES = 32 << 20
"""Larger blocks are given back to the system when they are freed."""


@click.command(context_settings={"auto_envvar_prefix": "PS_SERVER", "show_default": True})
@click.option("--shard", type=click.IntRange(0), help="Number of this shard, from 0. Required without TF_CONFIG.")
@click.option(
    "--coordinator",
    envvar=["PS_SERVER_COORDINATOR", "PS_COORDINATOR"],
    help="host:port of the coordinator. Required unless TF_CONFIG has a chief.",
)
@server_options(0, "PS_SERVER")
@server_security_options
@click.option(
    "--advertise",
    default="",
    help="host:port at which workers reach this shard, if they need another one.",
)
@click.option(
    "--bulk-ports",
    default="0",
    metavar="PORT|FIRST-LAST|off",
    help="TCP port of the bulk transport. In a range, the first free port is used. 0: any free port. off: all data "
    "goes over gRPC.",
)
@metrics_option("PS_SERVER_METRICS_PORT", "PS_METRICS_PORT")
@click.option("--shm/--no-shm", default=True, help="Use shared memory with workers on the same host.")
@storage_options
@click.option(
    "--standby",
    is_flag=True,
    help="Run as a standby while another process serves this shard: follow its log, and take over when it is lost. "
    "Both processes can have this option; each needs its own --data-dir.",
)
@click.option(
    "--acknowledge",
    type=click.Choice([each.value for each in Acknowledge]),
    default=Acknowledge.BEFORE.value,
    help="Whether a push is acknowledged before or after the standby has it. With before, a push that the standby "
    "lacks is lost when this process is lost.",
)
@click.option(
    "--add",
    is_flag=True,
    help="Add this shard to the running job if its number is new. It holds nothing until psctl move --to moves slices "
    "to it. A restart does not need this option.",
)
@click.option(
    "--take-over",
    is_flag=True,
    help="Replace the process that serves this shard, even if it is alive; it is fenced. Without this option, a "
    "process whose place is taken waits for one lease, and is refused if the other process is alive.",
)
@click.option(
    "--max-model-bytes",
    type=click.IntRange(0),
    default=0,
    show_default="the memory of the machine",
    help="Limit of the bytes of values in all models of this shard.",
)
@byte_limit_options
@click.option(
    "--checkpoint-dir",
    "checkpoint_dirs",
    type=click.Path(file_okay=False, path_type=Path),
    multiple=True,
    show_default="no checkpoints",
    help="Folder for checkpoints, the same as for ps-coordinator; this process writes to it. Repeat the option for a "
    "folder that --restore reads from. The shard writes to and reads from no other folders.",
)
@click.option(
    "--restore-dir",
    "restore_dirs",
    type=click.Path(file_okay=False, path_type=Path),
    multiple=True,
    show_default="those of --checkpoint-dir",
    help="Further folder that checkpoints are read from; it may be one that cannot be written to.",
)
@click.option(
    "--optimizers",
    envvar=[OPTIMIZERS_VARIABLE, "PS_SERVER_OPTIMIZERS"],
    default="",
    metavar="MODULE,…",
    help="Modules that register optimizer classes of your own, beside those of installed packages.",
)
@click.option(
    "--threads", type=click.IntRange(0), default=0, help="Number of threads of the optimizer; 0: half of the cores."
)
@click.option(
    "--stuck-seconds",
    type=click.FloatRange(0),
    default=STUCK_SECONDS,
    help=f"The process exits with code {EXIT_STUCK} when one task takes longer than this, plus one second for each "
    "10 MB it touches, so that a restart or a standby replaces it. 0: never.",
)
@exit_option
@shard_limit_options
@click.option(
    "--connect-timeout",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    help="Seconds to wait for the coordinator at the start.",
)
def main(
    shard: int | None,
    coordinator: str | None,
    bind: str,
    port: int,
    log_level: str,
    log_format: str,
    ready_file: Path | None,
    advertise: str,
    bulk_ports: str,
    metrics_port: str,
    shm: bool,
    optimizers: str,
    threads: int,
    connect_timeout: float,
    standby: bool,
    acknowledge: str,
    add: bool,
    stuck_seconds: float,
    max_model_bytes: int,
    take_over: bool,
    answer_mb: int,
    upload_mb: int,
    checkpoint_dirs: tuple[Path, ...],
    restore_dirs: tuple[Path, ...],
    exit_when_finished: bool,
    limits: ServerLimits,
    security: SecuritySettings,
    **storage: Any,
) -> None:
    """Run one shard, which holds slices of every model and applies the gradients that workers push.

    The shard joins the coordinator and receives its slices when a worker declares a model. With --data-dir it keeps
    them on disk as well as in memory, and a restart with the same directory continues from there. Stop it with Ctrl-C
    or SIGTERM.

    \b
    Example of a cluster with one shard:
      ps-coordinator --shards 1 --workers 2
      ps-server --shard 0 --coordinator 127.0.0.1:7000 --data-dir data
    """  # noqa: D301 -- click looks for the character
    with clean_errors():
        tune_allocator()
        configure_logging(log_level, LogFormat(log_format))
        describe_process(role="shard", job=os.environ.get("PS_JOB"))
        if text := os.environ.get("TF_CONFIG"):
            shard, coordinator, bind, port = _from_tf_config(TfConfig.parse(text), shard, coordinator, bind, port)
            # The engine that started the tasks may wait until all of them end.
            source = click.get_current_context().get_parameter_source("exit_when_finished")
            exit_when_finished = exit_when_finished or source is ParameterSource.DEFAULT
        describe_process(shard=shard)
        if shard is None or coordinator is None:
            missing = "--shard" if shard is None else "--coordinator"
            raise ConfigError(f"{missing} is missing", remedy=f"give {missing}, or set TF_CONFIG; see ps-server --help")
        split_address(coordinator, setting="--coordinator, PS_COORDINATOR or TF_CONFIG")
        if advertise:
            split_address(advertise, "this shard", "--advertise")
        metrics = MetricsConfig(bind, parse_port(metrics_port), advertise.rpartition(":")[0].strip("[]"))
        side_channels = SideChannelConfig(
            bind,
            parse_ports(bulk_ports),
            shm,
            token_seconds=limits.token_seconds,
            max_handshakes=limits.max_side_handshakes,
        )
        # What can be wrong is told before torch is imported, which takes its time on a busy machine.
        check_descriptors(OWN_DESCRIPTORS, f"shard {shard}")
        check_ready_file(ready_file)
        grpc_server.check_free(bind, port)
        Security(security, AccessRole.SERVER, listens=True).check_bind(bind, "this server")
        kept = storage_config(**storage)
        # The others may be there to be read.
        for folder in checkpoint_dirs[:1]:
            check_writable(folder)
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
            (*checkpoint_dirs, *restore_dirs),
            exit_when_finished,
            metrics,
            limits=limits,
            upload_bytes=upload_mb << 20,
            security=security,
        )
        serve = serving()
        load_modules(named_modules(optimizers))
        load_entry_points()
        grpc_server.run(lambda stop: serve(config, stop))


def serving() -> Callable[[ShardConfig, asyncio.Event], Coroutine[Any, Any, None]]:
    """What runs a shard; imported only now, because torch takes seconds to import. Raises ConfigError without torch."""
    # Modules stay: to look for garbage among them takes a fifth of the time, and later pushes would wait for it.
    looked = gc.isenabled()
    gc.disable()
    try:
        with ended_by_ctrl_c():
            from ps_server.shard import process
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ps_"):
            raise
        raise ConfigError(
            f"{error.name} is not installed, and a shard needs it", remedy="pip install 'torch-ps[server]'"
        ) from error
    finally:
        gc.freeze()
        if looked:
            gc.enable()
    return process.serve


def _check_followable(storage: StorageConfig) -> None:
    """Raises ConfigError for a shard without a log."""
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
            "--bulk-ports is not a port, a range of ports, or off", expected="7200, 7200-7299, 0 or off", actual=text
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


def tune_allocator() -> None:
    """Allocate from one heap in all threads, and keep its freed memory; called once, before threads are started.

    A payload's chunks are allocated by gRPC's threads and freed by the event loop. With a heap per thread each keeps
    what passed through it: 15 to 20 MB more resident memory at 100 MB of parameters (benchmarks, "shard memory"), and
    no faster. A heap whose free end goes back to the system at each step comes back page by page: 700 pages in a step
    of 1 MB over gRPC. The thresholds are the largest that glibc would choose by itself, in time or never, depending on
    what a process has freed before. Does nothing where the allocator is not glibc's.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * _MAPPED_FROM_BYTES)
    except (AttributeError, OSError) as error:
        logger.debug("the allocator cannot be told: %s", error)


def program() -> NoReturn:
    """The process of ps-server."""
    run_program(main)


if __name__ == "__main__":
    program()
