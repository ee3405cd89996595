"""The options of ps-run in a task of Slurm."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ps_server.cli.launcher.slurm.tasks import TaskLayout


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """How this job is laid out over the tasks of Slurm."""

    layout: TaskLayout
    tls_dir: Path | None = None
    insecure: bool = False


_OPTIONS = (
    click.option(
        "--slurm",
        is_flag=True,
        help="This is one task of srun: run its processes of the job alone (docs/deploy.md).",
    ),
    click.option(
        "--layout",
        type=click.Choice([each.value for each in TaskLayout]),
        default=TaskLayout.SEPARATE.value,
        show_default=True,
        help="With --slurm. separate: one process in each task, the coordinator, then shards, then workers. together: "
        "a worker in each task, beside some of them the servers.",
    ),
    click.option(
        "--tls-dir",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="With --slurm: folder of psctl certs init, which every task can read.",
    ),
)


def slurm_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command gets ``slurm`` (SlurmOptions, or None). Takes ``insecure`` from the options of hosts."""

    @functools.wraps(command)
    def gathered(*arguments: Any, slurm: bool, layout: str, tls_dir: Path | None, insecure: bool, **values: Any) -> Any:
        if not slurm and tls_dir is not None:
            raise click.UsageError("--tls-dir is for jobs with --slurm")
        chosen = SlurmOptions(TaskLayout(layout), tls_dir, insecure) if slurm else None
        return command(*arguments, slurm=chosen, **values)

    for option in reversed(_OPTIONS):
        gathered = option(gathered)
    return gathered
