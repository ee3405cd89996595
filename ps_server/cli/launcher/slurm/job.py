"""One task of Slurm as a part of a job: its processes and variables, and its exit code."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

from ps_protocol import times
from ps_protocol.client.worker_requests import WorkerRequests
from ps_protocol.errors import ConfigError
from ps_protocol.security.binding import is_loopback
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_protocol.security.settings import VARIABLES, SecuritySettings
from ps_protocol.text import whole_number
from ps_server.cli.launcher.events import ProcessName, ProcessRole
from ps_server.cli.launcher.hosts.job import check_listening
from ps_server.cli.launcher.programs import ASKS_FOR_LOST, Programs, security_environment
from ps_server.cli.launcher.runner import Runner
from ps_server.cli.launcher.screen import Screen
from ps_server.cli.launcher.slurm.task_supervisor import TaskSupervisor
from ps_server.cli.launcher.slurm.tasks import SlurmTask, TaskLayout, processes_of
from ps_server.serving.grpc_server import join_address

if TYPE_CHECKING:
    from ps_server.certs import CertificateFolder


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


@dataclass(frozen=True, slots=True)
class TaskPrograms(Programs):
    """The programs of one task, which knows the coordinator's address before that serves."""

    coordinator_address: str = ""
    certificates: CertificateFolder | None = None

    @classmethod
    def of(
        cls,
        programs: Programs,
        processes: list[ProcessName],
        address: str,
        coordinator: str,
        lineage: str,
        certificates: CertificateFolder | None,
        restarts_workers: bool,
    ) -> Self:
        """``programs``, of which ``processes`` run here, at ``address``. ``restarts_workers``: of any task."""
        asks = ASKS_FOR_LOST if restarts_workers else None
        values = {each.name: getattr(programs, each.name) for each in fields(programs)}
        values |= {
            "lineage": lineage,
            "addresses": dict.fromkeys(processes, address),
            "coordinator_settings": {**programs.coordinator_settings, "engine": asks, "exit_when_finished": True},
            "shard_settings": {**programs.shard_settings, "exit_when_finished": True},
        }
        return cls(**values, coordinator_address=coordinator, certificates=certificates)

    def command(self, process: ProcessName, coordinator: str) -> list[str]:
        """As of every job."""
        return Programs.command(self, process, self.coordinator_address)

    def environment(self, process: ProcessName, coordinator: str, inherited: Mapping[str, str]) -> dict[str, str]:
        """As of every job, and the certificate and token of ``process``."""
        environment = Programs.environment(self, process, self.coordinator_address, inherited)
        return {**environment, **security_environment(process, self.certificates)}


def run_in_slurm(
    programs: Programs,
    task: SlurmTask,
    options: SlurmOptions,
    restarts: tuple[int, int],
    screen: Screen,
    log_dir: Path | None,
) -> int:
    """Run the processes of ``task`` to their end. ``restarts``: of a worker and of a server. Raises ConfigError."""
    processes = processes_of(options.layout, task.number, task.tasks, programs.shards)
    address = own_address(task)
    environment = dict(os.environ)
    if options.insecure:
        environment[VARIABLES["insecure"]] = "1"
    certificates = _certificates(options.tls_dir, programs.job)
    check_listening({task.node: address}, environment, tls=certificates is not None)
    environment.setdefault("OMP_NUM_THREADS", str(threads(task, environment)))
    coordinator = join_address(task.coordinator_node, task.port(programs.port))
    # Slurm starts a job again after the end of all its processes.
    lineage = f"slurm {environment.get('SLURM_CLUSTER_NAME', '')} {task.job} {task.step}"
    programs = replace(programs, shares_hosts=task.shares_nodes)
    programs = TaskPrograms.of(programs, processes, address, coordinator, lineage, certificates, restarts[0] > 0)
    screen.say(f"task {task.number} of {task.tasks} on {task.node}: {', '.join(map(str, processes))}")
    supervisor = TaskSupervisor(processes, *restarts)
    requests = None
    if supervisor.restarts_workers or any(process.part is ProcessRole.SHARD for process in processes):
        role = AccessRole.WORKER
        settings = SecuritySettings.from_environment(environment)
        settings = certificates.settings("worker", role=role) if certificates else settings
        requests = WorkerRequests(coordinator, Security(settings, role), times.TASK_ASK_SECONDS)
    runner = Runner(supervisor, programs, screen, environment, log_dir, show_progress=False, requests=requests)
    return runner.run()


def own_address(task: SlurmTask) -> str:
    """The address at which the other nodes reach this one: its name, where that is no loopback address here.

    Nodes that are all loopback addresses here are on this machine. Raises ConfigError where there is none.
    """
    # The first one that is not ends the search: names of other nodes may be many.
    if all(is_loopback(node) for node in {task.node: None, **dict.fromkeys(task.nodes)}) or not is_loopback(task.node):
        return task.node
    other = next(node for node in task.nodes if node != task.node)
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: it chooses the route.
        probe.connect((other, 9))
        return str(probe.getsockname()[0])
    raise ConfigError(
        f"the address at which other nodes reach {task.node} is not known",
        actual=f"{task.node} is a loopback address on this node, and {other} is not known here",
        remedy="give the nodes names that the others resolve",
    )


def threads(task: SlurmTask, environ: Mapping[str, str]) -> int:
    """Of each worker: --cpus-per-task, else its part of the cores that this task may use."""
    if asked := whole_number(environ.get("SLURM_CPUS_PER_TASK", "")):
        return asked
    beside = -(-task.tasks // max(1, len(set(task.nodes))))
    return max(1, len(os.sched_getaffinity(0)) // beside)


def _certificates(path: Path | None, job: str) -> CertificateFolder | None:
    if path is None:
        return None
    from ps_server.certs import CertificateFolder  # slow to import

    folder = CertificateFolder(path.absolute(), job)
    if not folder.authority_file.exists():
        raise ConfigError(
            f"{path} has no certificates",
            remedy=f"make them before srun: psctl certs init {path} --shards N --host NODE",
        )
    return folder
