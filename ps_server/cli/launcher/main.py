"""The command ps-run: a whole job on this machine, one process each."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import click

from ps_protocol.cluster.address import parse_metrics_port
from ps_protocol.cluster.job import DEFAULT_JOB
from ps_protocol.cluster.scaling import MOST_RANKS, WorkerRange
from ps_protocol.errors import ConfigError
from ps_protocol.files import OwnFolder
from ps_protocol.logs import LEVELS, LogFormat
from ps_protocol.model.spec import Mode
from ps_server.checkpoint.files import check_writable
from ps_server.cli.launcher.benchmark import benchmark
from ps_server.cli.launcher.hosts.job import HostsOptions, hosts_options, run_on_hosts, script_on_hosts, workers_of
from ps_server.cli.launcher.job_folder import RUN_FOLDERS, JobFolder, JobTrace, lineage_of, make_log_folder
from ps_server.cli.launcher.programs import Programs, Script
from ps_server.cli.launcher.rehearse import rehearse
from ps_server.cli.launcher.replicas import ReplicaPrograms, check_strategy, given_values, gpus, has_servers
from ps_server.cli.launcher.runner import Runner
from ps_server.cli.launcher.screen import Screen
from ps_server.cli.launcher.slurm.job import SlurmOptions, run_in_slurm, slurm_options
from ps_server.cli.launcher.slurm.tasks import SlurmTask
from ps_server.cli.launcher.slurm.tasks import workers_of as workers_of_tasks
from ps_server.cli.launcher.supervisor import JobPlan, JobSupervisor
from ps_server.cli.options.checkpoint import CheckpointConfig, checkpoint_config, step_in
from ps_server.cli.options.common import (
    OWN_DESCRIPTORS,
    WORKERS,
    check_descriptors,
    clean_errors,
    config_option,
    format_option,
    page_port_option,
    run_program,
    version_option,
)
from ps_server.cli.options.mode import MODES, ModeOptions
from ps_server.cli.options.security import job_option
from ps_server.cli.options.storage import Durability, StorageConfig, StorageOptions
from ps_server.coordinator.elasticity.policy import ElasticSettings
from ps_server.coordinator.membership.admission import MOST_SHARDS
from ps_server.coordinator.settings import ClusterSettings, PartitionOptions
from ps_server.limits import JobLimits, ServerLimits, ShardLimits
from ps_server.serving.metrics import metrics_option
from ps_server.settings import PortOption, configured, given_settings, options

SERVER_RESTARTS = 10
"""Default of a job that keeps its state on disk."""


def find_script(python: str, target: str, arguments: tuple[str, ...], *, module: bool) -> Script:
    """The command of a worker. Raises click.UsageError when the interpreter, file or module does not exist."""
    interpreter = shutil.which(python)
    if interpreter is None:
        raise click.UsageError(f"no interpreter '{python}'")
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
    """How often servers are restarted. Raises ConfigError when they would come back without their state."""
    if storage.durability is not Durability.MEMORY:
        return SERVER_RESTARTS if asked is None else asked
    if asked:
        raise ConfigError(
            "--restart-servers needs servers that keep their state on disk",
            remedy="give --data-dir, and not --durability memory, or leave --restart-servers out",
        )
    return 0


def coordinator_settings(context: click.Context, mode: str, checkpoints: CheckpointConfig) -> dict[str, object]:
    """What a user of ps-run has set for the coordinator."""
    kinds = (ModeOptions, PartitionOptions, ClusterSettings, ElasticSettings, CheckpointConfig, ServerLimits, JobLimits)
    return {"mode": mode, **given_settings(context, *kinds), "checkpoint_dir": checkpoints.directory}


def shard_settings(context: click.Context, checkpoints: CheckpointConfig) -> dict[str, object]:
    """What a user of ps-run has set for the shards, and the folders in which they write and read checkpoints."""
    source = checkpoints.restore
    elsewhere = source is not None and source != "latest" and step_in(source) is None
    return {
        **given_settings(context, StorageOptions, ShardLimits),
        "checkpoint_dir": checkpoints.directory,
        "restore_dir": Path(source).absolute().parent if source is not None and elsewhere else None,
    }


def run_replicas(programs: Programs, form: LogFormat, log_dir: Path | None) -> int:
    """A job of ``programs.workers`` scripts alone, to its end; returns the exit code."""
    with OwnFolder(RUN_FOLDERS) as folder:
        replicas = ReplicaPrograms.of(programs, folder.path / "store")
        screen = Screen(form=form)
        screen.say(replicas.summary(goes_on=False))
        supervisor = JobSupervisor(JobPlan(0, replicas.workers, coordinated=False))
        with clean_errors():
            return Runner(supervisor, replicas, screen, os.environ, log_dir, show_progress=False).run()


OTHER_COMMANDS = {command.name: command for command in (benchmark, rehearse)}
"""Commands of ps-run besides the one that runs a job."""


class JobCommand(click.Command):
    """ps-run; ``ps-run benchmark`` and ``ps-run rehearse`` are other commands, unless a script has that name."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **named: Any) -> Any:  # type: ignore[override]
        """As in click."""
        given = list(sys.argv[1:] if args is None else args)
        name = given[0] if given else ""
        if name in OTHER_COMMANDS and not Path(name).exists():
            return OTHER_COMMANDS[name].main(given[1:], f"ps-run {name}", **named)
        return super().main(args, prog_name, **named)


@click.command(
    cls=JobCommand,
    context_settings={"allow_interspersed_args": False, "max_content_width": 110, "auto_envvar_prefix": "PS_RUN"},
)
@config_option
@click.option(
    "--shards",
    type=click.IntRange(1, MOST_SHARDS),
    default=1,
    show_default=True,
    help="Number of shards, the processes that hold parameters.",
)
@click.option(
    "--workers",
    type=WORKERS,
    default=1,
    show_default=True,
    help="Number of workers, the processes that train. MIN:MAX: begin with MIN; more come by psctl scale --workers, or "
    "join by hand with PS_COORDINATOR, MAX at most. 0: servers only, and any number of workers that come and go.",
)
@click.option(
    "--evaluators",
    type=click.IntRange(0, MOST_RANKS),
    default=0,
    show_default=True,
    help="Number of evaluators, which read the newest parameters and do not train.",
)
@click.option(
    "--strategy",
    metavar="NAME",
    help="Strategy of a script that calls ps_worker.strategy(). With mirrored, multi_worker_mirrored, one_device or "
    "tpu there are --workers processes and no servers; mirrored takes one for each GPU by default.",
)
@click.option(
    "--mode", type=MODES, default=Mode.ASYNC.value, show_default=True, help="How far workers may drift apart."
)
@options(ModeOptions)
@click.option("--seed", type=click.IntRange(0), help="Seed of the job, for shuffling.  [default: random]")
@click.option(
    "--restart-workers",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="N",
    help="Restart failed workers, up to N times in total. The next failure ends the job.",
)
@options(StorageOptions, CheckpointConfig, PartitionOptions, ClusterSettings, ElasticSettings, ShardLimits, JobLimits)
@hosts_options
@slurm_options
@click.option(
    "--port",
    cls=PortOption,
    type=click.IntRange(0, 65535),
    default=0,
    show_default="any free one",
    help="Port of the coordinator, on 127.0.0.1 without --hosts.",
)
@click.option("--page", is_flag=True, help="Serve a web page of the job on any free port, and print its address.")
@page_port_option
@metrics_option(
    "PS_RUN_METRICS_PORT", "PS_METRICS_PORT", what="the coordinator; every other process takes any free one"
)
@job_option("Name of the job, for metrics, logs, the page and its certificates. PS_JOB.  [default: job]")
@click.option(
    "--tls",
    is_flag=True,
    help="Encrypt all connections of the job and authenticate its processes, with certificates and tokens made for "
    "it: in the folder tls of --data-dir, else until the job ends.",
)
@click.option(
    "--restart-servers",
    type=click.IntRange(0),
    metavar="N",
    help="Restart a coordinator or shards that ended too early, up to N times in total.  "
    f"[default: {SERVER_RESTARTS} if they keep their state on disk, else 0]",
)
@click.option(
    "--threads",
    type=click.IntRange(1),
    help="Number of torch threads of each shard. OMP_NUM_THREADS sets that of workers.",
)
@click.option(
    "--per-host/--no-per-host",
    default=None,
    show_default="PS_PER_HOST; else, on several hosts, in sync",
    help="Workers of one host push together: one of them sends the mean of their gradients, and receives the "
    "parameters for all: for a slow network. In async and ssp that is one update per host.",
)
@click.option(
    "--fork-shards/--no-fork-shards",
    default=True,
    show_default=True,
    help="Fork the shards of this machine from one process that has imported their modules; without, each shard "
    "imports them itself.",
)
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for a copy of the output of each process, in one file per process.",
)
@click.option(
    "--log-level",
    type=click.Choice(LEVELS),
    default="warning",
    show_default=True,
    help="Lowest level of coordinator and shard messages that is shown.",
)
@format_option("PS_RUN", " In JSON, what a script prints is a record with the event output.")
@click.option(
    "--trace",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for a trace of every step, on workers and shards: trace.json, for Perfetto or chrome://tracing.",
)
@click.option(
    "--tensorboard",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for TensorBoard event files of what cluster.report() tells, in a folder per worker.",
)
@click.option(
    "--optimizers",
    default="",
    metavar="MODULE,…",
    help="Modules that register optimizer classes of your own, imported by shards and workers (docs/optimizers.md).",
)
@click.option(
    "--no-progress",
    is_flag=True,
    help="Do not show the status table of the job; where stderr is not a terminal, nor the status lines, which come on "
    "changes and once a minute.",
)
@click.option(
    "--python", default=sys.executable, metavar="EXE", help="Python interpreter that runs SCRIPT.  [default: this one]"
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as in python -m.")
@version_option
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def main(
    context: click.Context,
    /,
    *,
    hosts: HostsOptions | None,
    slurm: SlurmOptions | None,
    port: int,
    job: str | None,
    tls: bool,
    page: bool,
    page_port: int | None,
    metrics_port: str,
    shards: int,
    workers: WorkerRange,
    evaluators: int,
    strategy: str | None,
    mode: str,
    seed: int | None,
    restart_workers: int,
    restart_servers: int | None,
    threads: int | None,
    per_host: bool | None,
    fork_shards: bool,
    log_dir: Path | None,
    trace: Path | None,
    tensorboard: Path | None,
    optimizers: str,
    log_level: str,
    log_format: str,
    no_progress: bool,
    python: str,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
    **others: Any,
) -> None:
    """Run SCRIPT as a job: one process for the coordinator, each shard and each worker, here or on --hosts.

    All arguments after SCRIPT are passed to it. The exit code is 0 when every worker exits with 0, else that of the
    first worker that failed (128 + signal if it was killed), or 74 when all went well but the last checkpoint was not
    written. ps-run leaves no process behind.

    With --data-dir the job survives the end of its servers and of ps-run: the same command continues it. After a job
    that finished, the same command continues to train from its parameters.

    ps-run benchmark SCRIPT runs it under several strategies and prints what each took.
    """
    given = given_values(context)
    check_strategy(strategy, given)
    if strategy == "central_storage":
        mode = Mode.SYNC.value
    if strategy == "mirrored" and "workers" not in given:
        workers = WorkerRange.of(max(1, gpus(os.environ)))
    if not has_servers(strategy) and not workers.fixed:
        raise click.UsageError(f"--workers {workers}: the number of processes of strategy {strategy} is fixed")
    with clean_errors():
        if hosts is not None and ("workers" not in given or not workers.bounded):
            # Of any number, as many as have a slot.
            slots = workers_of(hosts)
            workers = WorkerRange(workers.least, slots) if "workers" in given else WorkerRange.of(slots)
        task = SlurmTask.from_environment(os.environ) if slurm is not None else None
        begun: int | None = None
        if slurm is not None and task is not None:
            asked = workers.most if "workers" in given and workers.bounded else None
            tasks = workers_of_tasks(slurm.layout, task.tasks, shards, asked)
            # Every task starts its worker at once: the job begins with the first that come.
            begun = tasks
            workers = WorkerRange.of(tasks) if workers.fixed or "workers" not in given else workers
        if (hosts or slurm) and trace is not None:
            remedy = "give --env PS_TRACE=FOLDER, a folder that the hosts share, and psctl trace FOLDER afterwards"
            raise ConfigError("--trace is for jobs on this machine", remedy=remedy)
        storage = configured(StorageOptions, others).config()
        restarts = server_restarts(restart_servers, storage)
        serves_metrics = parse_metrics_port(metrics_port)
        checkpoints = checkpoint_config(others)
        if checkpoints.directory is not None and hosts is None and has_servers(strategy):
            check_writable(checkpoints.directory)
        if log_dir is not None:
            make_log_folder(log_dir)
        started = 1 if slurm is not None else 1 + shards + workers.least + evaluators
        # Of each process a pipe, with --hosts both of its ends, and its log.
        check_descriptors(OWN_DESCRIPTORS + 3 * started, f"ps-run with {started} processes")
        job_trace = JobTrace(trace) if trace is not None else None
    form = LogFormat(log_format)
    programs = Programs(
        script=(find_script if hosts is None else script_on_hosts)(python, script, arguments, module=module),
        consistency=configured(ModeOptions, others).consistency(mode),
        shards=shards,
        workers=workers.least if begun is None else begun,
        cores=len(os.sched_getaffinity(0)),
        shard_threads=threads,
        seed=seed,
        log_level=log_level,
        log_format=form,
        storage=storage,
        checkpoints=checkpoints,
        coordinator_settings=coordinator_settings(context, mode, checkpoints),
        shard_settings=shard_settings(context, checkpoints),
        port=port,
        job=job or DEFAULT_JOB,
        tls=tls,
        page_port=0 if page and page_port is None else page_port,
        metrics_port=serves_metrics,
        trace=job_trace.folder if job_trace else None,
        tensorboard=tensorboard.absolute() if tensorboard else None,
        strategy=strategy or "",
        optimizers=optimizers,
        forks_shards=fork_shards and hosts is None and slurm is None,
        worker_range=None if workers.fixed else workers,
        per_host=per_host,
    )
    if not has_servers(strategy):
        sys.exit(run_replicas(programs, form, log_dir))
    screen = Screen(form=form)
    if slurm is not None and task is not None:
        with clean_errors():
            code = run_in_slurm(programs, task, slurm, (restart_workers, restarts), screen, log_dir)
        sys.exit(code)
    folder = None
    if hosts is None and programs.keeps_state and storage.data_dir is not None:
        with clean_errors():
            folder = JobFolder(storage.data_dir)
        programs = replace(programs, lineage=lineage_of(storage.data_dir))
    if folder is not None and folder.used_before:
        screen.say(f"continuing from the state in {folder.path}; use another --data-dir to begin a new job")
    saves = checkpoints.directory is not None
    plan = JobPlan(shards, workers.least, evaluators, restart_workers, restarts, saves, elastic=not workers.fixed)
    supervisor = JobSupervisor(plan)
    if hosts is not None:
        with clean_errors():
            code = run_on_hosts(
                programs, supervisor, evaluators, screen, hosts, log_dir, module=module, show_progress=not no_progress
            )
        sys.exit(code)
    runner = Runner(supervisor, programs, screen, os.environ, log_dir, not no_progress, folder)
    with clean_errors():
        code = runner.run()
    if job_trace is not None:
        screen.say(job_trace.finish(), event="trace")
    sys.exit(code)


def program() -> NoReturn:
    """The process of ps-run."""
    run_program(main)


if __name__ == "__main__":
    program()
