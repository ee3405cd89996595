"""``ps-server``: one shard as a process."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, NoReturn

import click

from ps_protocol.cluster.tf_config import TfConfig
from ps_protocol.errors import ConfigError
from ps_protocol.logs import LogFormat, configure_logging, describe_process
from ps_protocol.model.registered_optimizers import ENVIRONMENT as OPTIMIZERS_VARIABLE
from ps_protocol.model.registered_optimizers import load_entry_points, load_modules, named_modules
from ps_server.cli.options.common import clean_errors, exit_option, run_program, server_options
from ps_server.cli.options.security import server_security_options
from ps_server.cli.options.storage import StorageOptions
from ps_server.entry import ended_by_ctrl_c
from ps_server.limits import ShardLimits
from ps_server.serving import grpc_server
from ps_server.serving.metrics import metrics_option
from ps_server.settings import options, was_given
from ps_server.shard.config import ShardConfig, SideChannelConfig, configure

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
@metrics_option("PS_SERVER_METRICS_PORT", "PS_METRICS_PORT")
@click.option(
    "--bulk-ports",
    default="0",
    metavar="PORT|FIRST-LAST|off",
    help="TCP port of the bulk transport. In a range, the first free port is used. 0: any free port. off: all data "
    "goes over gRPC.",
)
@options(SideChannelConfig, StorageOptions, ShardConfig)
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
@exit_option
@options(ShardLimits)
def main(**values: Any) -> None:
    """Run one shard, which stores slices of every model and applies the gradients that workers push.

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
        configure_logging(values["log_level"], LogFormat(values["log_format"]))
        describe_process(role="shard", job=os.environ.get("PS_JOB"))
        if text := os.environ.get("TF_CONFIG"):
            values |= _from_tf_config(TfConfig.parse(text), values)
        describe_process(shard=values["shard"])
        config = configure(values)
        serve = serving()
        load_modules(named_modules(values["optimizers"]))
        load_entry_points()
        grpc_server.run(lambda stop: serve(config, stop))


def serving() -> Callable[[ShardConfig, asyncio.Event], Coroutine[Any, Any, None]]:
    """Import and return what runs a shard: torch takes seconds to import. Raises ConfigError without torch."""
    # Modules stay. Collecting garbage among them takes a fifth of the time, and would delay later pushes.
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


def _from_tf_config(tf_config: TfConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values in TF_CONFIG of options that were not given: number, coordinator, bind, port, and when to end."""
    shard = values["shard"]
    if shard is None and tf_config.task_type != "ps":
        raise ConfigError(
            f"ps-server runs the tasks of type ps; this TF_CONFIG says {tf_config.task_type} {tf_config.task_index}",
            remedy="run ps-coordinator on the chief, the training script on workers, or give --shard",
        )
    number = tf_config.task_index if shard is None else shard
    host, _, port = tf_config.shard_address(number).rpartition(":")
    # The engine that started the tasks may wait until all of them end.
    found = {"bind": host.strip("[]"), "port": int(port), "exit_when_finished": True}
    context = click.get_current_context()
    found = {name: value for name, value in found.items() if not was_given(context, name)}
    return found | {"shard": number, "coordinator": values["coordinator"] or tf_config.coordinator_address}


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
        logger.debug("the allocator cannot be tuned: %s", error)


def program() -> NoReturn:
    """The process of ps-server."""
    run_program(main)


if __name__ == "__main__":
    program()
