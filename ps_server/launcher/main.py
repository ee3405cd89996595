"""The command ps-run: a whole job on this machine, one process each."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import sys
from pathlib import Path

import click

from ps_protocol.model import Mode
from ps_server.cli import LOG_LEVELS
from ps_server.launcher.programs import Programs, Script
from ps_server.launcher.runner import Runner
from ps_server.launcher.screen import Screen
from ps_server.launcher.supervisor import JobPlan, Supervisor
from ps_server.mode_options import MODES, bound_options, consistency_of


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


@click.command(context_settings={"allow_interspersed_args": False, "max_content_width": 110})
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
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def main(
    *,
    shards: int,
    workers: int,
    evaluators: int,
    mode: str,
    staleness: int | None,
    backup: int | None,
    stale_policy: str | None,
    stale_threshold: int | None,
    seed: int | None,
    restart_workers: int,
    threads: int | None,
    log_dir: Path | None,
    log_level: str,
    no_progress: bool,
    python: str,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT as a whole job on this machine: a coordinator, shards and workers, one process each.

    Everything after SCRIPT belongs to it. The exit code is 0 when every worker ends with 0, else that of the first
    worker that failed (128 + signal if it was killed). Nothing is left running, however ps-run ends.
    """
    programs = Programs(
        script=find_script(python, script, arguments, module=module),
        consistency=consistency_of(mode, staleness, backup, stale_policy, stale_threshold),
        shards=shards,
        workers=workers,
        cores=len(os.sched_getaffinity(0)),
        shard_threads=threads,
        seed=seed,
        log_level=log_level,
    )
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
    supervisor = Supervisor(JobPlan(shards, workers, evaluators, restart_workers))
    runner = Runner(supervisor, programs, Screen(), os.environ, log_dir, show_progress=not no_progress)
    sys.exit(runner.run())


if __name__ == "__main__":
    main()
