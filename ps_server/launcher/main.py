"""The command ps-run: a whole job on this machine, one process each."""

from __future__ import annotations

import errno
import importlib.machinery
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ps_protocol.errors import ConfigError
from ps_protocol.model import Mode
from ps_server.checkpoint_options import checkpoint_config, checkpoint_options
from ps_server.cli import LOG_LEVELS, clean_errors, config_option, version_option
from ps_server.cluster_options import CLUSTER_OPTIONS, cluster_options, given_flags
from ps_server.launcher.job_folder import JobFolder, lineage_of
from ps_server.launcher.programs import Programs, Script
from ps_server.launcher.runner import Runner
from ps_server.launcher.screen import Screen
from ps_server.launcher.supervisor import JobPlan, Supervisor
from ps_server.mode_options import MODES, bound_options, consistency_of
from ps_server.private_files import make_private_folder
from ps_server.storage_options import Durability, StorageConfig, storage_config, storage_options

SERVER_RESTARTS = 10
"""Of a job that keeps its state, unless told otherwise."""


def find_script(python: str, target: str, arguments: tuple[str, ...], *, module: bool) -> Script:
    """The command of a worker. Raises click.UsageError when there is no such interpreter, file or module."""
    interpreter = shutil.which(python)
    if interpreter is None:
        raise click.UsageError(f"no program '{python}' to run the script with")
    if not module:
        if not Path(target).is_file():
            raise click.UsageError(f"no such script: '{target}' (in {Path.cwd()})")
        return Script((interpreter, target), arguments)
    # Another interpreter may have modules that this one lacks.
    package = target.partition(".")[0]
    if (
        python == sys.executable
        and importlib.machinery.PathFinder.find_spec(package, [str(Path.cwd()), *sys.path]) is None
    ):
        raise click.UsageError(f"no module named '{package}' (looked in {Path.cwd()} and the installed packages)")
    return Script((interpreter, "-m", target), arguments)


def server_restarts(asked: int | None, storage: StorageConfig) -> int:
    """How often servers are started again. Raises ConfigError when they would come back without their state."""
    if storage.durability is not Durability.MEMORY:
        return SERVER_RESTARTS if asked is None else asked
    if asked:
        raise ConfigError(
            "--restart-servers needs servers that keep their state",
            remedy="give --data-dir, and not --durability memory, or leave --restart-servers out",
        )
    return 0


def make_log_folder(path: Path) -> None:
    """Raises ConfigError where the folder cannot be made, or no files in it."""
    try:
        make_private_folder(path)
        reason = "" if os.access(path, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise ConfigError(
            f"the folder {path} cannot be written: {reason}",
            remedy="give as --log-dir one that this user may write to",
        )


@click.command(
    context_settings={"allow_interspersed_args": False, "max_content_width": 110, "auto_envvar_prefix": "PS_RUN"}
)
@config_option
@click.option("--shards", type=click.IntRange(1), default=1, show_default=True, help="Processes that hold parameters.")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Processes that train.")
@click.option("--evaluators", type=click.IntRange(0), default=0, show_default=True, help="Processes that follow.")
@click.option(
    "--mode", type=MODES, default=Mode.ASYNC.value, show_default=True, help="How far workers may drift apart."
)
@bound_options
@click.option("--seed", type=click.IntRange(0), help="The job's common seed, for shuffling.  [default: random]")
@click.option(
    "--restart-workers",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="Start failed workers again, N times in total; a failure after that ends the job.",
)
@storage_options
@checkpoint_options
@cluster_options
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default="any free one",
    help="Port of the coordinator, for psctl; on 127.0.0.1.",
)
@click.option(
    "--restart-servers",
    type=click.IntRange(0),
    metavar="N",
    help="Start a coordinator or shards that ended too early again, N times in total.  "
    f"[default: {SERVER_RESTARTS} where they keep their state, else 0]",
)
@click.option("--threads", type=click.IntRange(1), help="Torch threads of a shard; workers follow OMP_NUM_THREADS.")
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder that gets each process's output in a file of its own, too.",
)
@click.option(
    "--log-level",
    type=click.Choice(LOG_LEVELS),
    default="warning",
    show_default=True,
    help="Least important message of coordinator and shards that is shown.",
)
@click.option("--no-progress", is_flag=True, help="Show no live table, or no line every two seconds.")
@click.option("--python", default=sys.executable, metavar="EXE", help="Interpreter for SCRIPT.  [default: this one]")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module name, as for python -m.")
@version_option
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def main(
    context: click.Context,
    /,
    *,
    port: int,
    shards: int,
    workers: int,
    evaluators: int,
    mode: str,
    staleness: int | None,
    backup: int | None,
    grace_seconds: float | None,
    stale_policy: str | None,
    stale_threshold: int | None,
    seed: int | None,
    restart_workers: int,
    restart_servers: int | None,
    threads: int | None,
    log_dir: Path | None,
    log_level: str,
    no_progress: bool,
    python: str,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
    checkpoint_dir: Path | None,
    checkpoint_seconds: float | None,
    checkpoint_keep: int,
    checkpoint_full_every: int,
    restore: str | None,
    **others: Any,
) -> None:
    """Run SCRIPT as a whole job on this machine: a coordinator, shards and workers, one process each.

    Everything after SCRIPT belongs to it. The exit code is 0 when every worker ends with 0, else that of the first
    worker that failed (128 + signal if it was killed). Nothing is left running, however ps-run ends.

    With --data-dir the job survives the death of its servers, and of ps-run: the same command goes on where it was.
    After a job that ended well it trains on from the parameters that the folder holds.
    """
    with clean_errors():
        storage = storage_config(**{name: value for name, value in others.items() if name not in CLUSTER_OPTIONS})
        restarts = server_restarts(restart_servers, storage)
        checkpoints = checkpoint_config(checkpoint_dir, checkpoint_seconds, checkpoint_keep, checkpoint_full_every)
        if log_dir is not None:
            make_log_folder(log_dir)
    programs = Programs(
        script=find_script(python, script, arguments, module=module),
        consistency=consistency_of(mode, staleness, backup, grace_seconds, stale_policy, stale_threshold),
        shards=shards,
        workers=workers,
        cores=len(os.sched_getaffinity(0)),
        shard_threads=threads,
        seed=seed,
        log_level=log_level,
        storage=storage,
        checkpoints=checkpoints,
        restore=restore,
        coordinator_flags=given_flags(context),
        port=port,
    )
    folder = None
    if programs.keeps_state and storage.data_dir is not None:
        with clean_errors():
            folder = JobFolder(storage.data_dir)
        programs = replace(programs, lineage=lineage_of(storage.data_dir))
    screen = Screen()
    if folder is not None and folder.used_before:
        screen.say(f"going on from the state that {folder.path} holds; another --data-dir begins anew")
    saves = checkpoint_dir is not None
    supervisor = Supervisor(JobPlan(shards, workers, evaluators, restart_workers, restarts, saves))
    runner = Runner(supervisor, programs, screen, os.environ, log_dir, not no_progress, folder)
    sys.exit(runner.run())


if __name__ == "__main__":
    main()
