"""A job of ps-run on several hosts, from its options to its exit code."""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from ps_protocol.errors import ConfigError
from ps_protocol.security.binding import is_loopback
from ps_protocol.security.settings import VARIABLES, SecuritySettings
from ps_server.cli.launcher.events import ProcessRole
from ps_server.cli.launcher.hosts.fleet import Fleet, HostsJob
from ps_server.cli.launcher.hosts.placing import (
    THREADS_VARIABLE,
    HostEntry,
    all_slots,
    hosts_of,
    hosts_of_file,
    shares_hosts,
    spread,
)
from ps_server.cli.launcher.programs import Programs, Script
from ps_server.cli.launcher.runner import Runner
from ps_server.cli.launcher.screen import Screen
from ps_server.cli.launcher.supervisor import Supervisor
from ps_server.cli.options.common import clean_errors


@dataclass(frozen=True, slots=True)
class HostsOptions:
    """The hosts of a job, and how they are reached."""

    hosts: tuple[HostEntry, ...]
    ssh: str = "ssh"
    #: Variables that are passed: NAME or NAME=VALUE.
    variables: tuple[str, ...] = ()
    insecure: bool = False


_OPTIONS = (
    click.option(
        "--hosts",
        metavar="HOST[:SLOTS],…",
        help="Run the job on these hosts over ssh: the coordinator on the first, shards in turn, as many workers on "
        "each as it has slots (1 by default). Every host has the folder that ps-run is called in (docs/deploy.md).",
    ),
    click.option(
        "--hostfile",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="File with a host on each line, as in 'host0 slots=4 address=10.0.0.5', instead of --hosts.",
    ),
    click.option(
        "--ssh", default="ssh", show_default=True, metavar="COMMAND", help="ssh and its options, for --hosts."
    ),
    click.option(
        "-x",
        "--env",
        multiple=True,
        metavar="NAME[=VALUE]",
        help="Variable for the processes on --hosts, beside PS_… and OMP_NUM_THREADS. Repeat it for others.",
    ),
    click.option(
        "--insecure",
        is_flag=True,
        help="Let the processes on --hosts or in Slurm listen without TLS and tokens: everybody who reaches them is "
        "trusted.",
    ),
)


def hosts_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command gets ``hosts`` (HostsOptions, or None for a job on this machine) and ``insecure`` (bool)."""

    @functools.wraps(command)
    def gathered(
        *arguments: Any,
        hosts: str | None,
        hostfile: Path | None,
        ssh: str,
        env: tuple[str, ...],
        insecure: bool,
        **values: Any,
    ) -> Any:
        with clean_errors():
            entries = _entries(hosts, hostfile)
            _check_ssh(ssh)
        if entries is None and (env or (insecure and not values.get("slurm"))):
            raise click.UsageError(f"{'--env' if env else '--insecure'} is for jobs with --hosts")
        if entries is not None and values.get("slurm"):
            raise click.UsageError("--hosts and --slurm are two ways to start a job: give one")
        chosen = HostsOptions(entries, ssh, env, insecure) if entries is not None else None
        return command(*arguments, hosts=chosen, insecure=insecure, **values)

    for option in reversed(_OPTIONS):
        gathered = option(gathered)
    return gathered


def _entries(hosts: str | None, hostfile: Path | None) -> tuple[HostEntry, ...] | None:
    if hosts is not None and hostfile is not None:
        raise ConfigError("--hosts and --hostfile are both given", remedy="leave one of them out")
    if hosts is not None:
        return hosts_of(hosts)
    if hostfile is None:
        return None
    try:
        return hosts_of_file(hostfile.read_text(), str(hostfile))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{hostfile} cannot be read: {error}", remedy="name a text file") from error


def _check_ssh(ssh: str) -> None:
    try:
        words = shlex.split(ssh)
    except ValueError as error:
        raise ConfigError(f"--ssh is no command: {error}", actual=ssh, remedy="correct the quotes") from error
    if not words:
        raise ConfigError("--ssh is empty", remedy="name ssh, or leave --ssh out")


def workers_of(options: HostsOptions) -> int:
    """The number of workers where none is given: one for each slot. Raises ConfigError when there is none."""
    if (slots := all_slots(options.hosts)) == 0:
        raise ConfigError("no host has a slot for a worker", remedy="give one of them slots, as in host1:4")
    return slots


def script_on_hosts(python: str, target: str, arguments: tuple[str, ...], *, module: bool) -> Script:
    """The command of a worker; the hosts check that they have it."""
    return Script((python, "-m", target) if module else (python, target), arguments)


def servers_on_hosts(python: str, programs: Programs) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The commands of the servers of ``programs``, with the interpreter of the hosts."""
    coordinator, shard = programs.servers
    return (python, *coordinator[1:]), (python, *shard[1:])


def run_on_hosts(
    programs: Programs,
    supervisor: Supervisor,
    evaluators: int,
    screen: Screen,
    options: HostsOptions,
    log_dir: Path | None = None,
    *,
    module: bool,
    show_progress: bool,
) -> int:
    """Run ``programs`` to their end. Raises ConfigError and Unavailable where a host cannot take part."""
    command = programs.script.command
    environment = passed(os.environ, options.variables)
    if options.insecure:
        environment[VARIABLES["insecure"]] = "1"
    placed = spread(options.hosts, programs.shards, _most_workers(programs), evaluators)
    used = [host for host in options.hosts if host in placed.values()]
    job = HostsJob(
        placed,
        used,
        python=command[0],
        script="" if module else command[1],
        data_dir=programs.storage.data_dir if programs.keeps_state else None,
        checkpoint_dir=programs.checkpoints.directory,
        ssh=options.ssh,
    )
    programs = replace(programs, servers=servers_on_hosts(command[0], programs), shares_hosts=shares_hosts(placed))
    with Fleet(job, environment) as fleet:
        check_listening(fleet.addresses, environment, tls=programs.tls)
        programs = replace(programs, addresses={process: fleet.address_of(process) for process in placed})
        if job.data_dir is not None:
            digest = hashlib.blake2b(fleet.identity.encode(), digest_size=16)
            programs = replace(programs, lineage=digest.hexdigest())
        if fleet.goes_on:
            screen.say(f"continuing from the state in {fleet.identity}; use another --data-dir to begin a new job")
        screen.say(f"hosts: {describe(job)}")
        return Runner(supervisor, programs, screen, environment, log_dir, show_progress, machines=fleet).run()


def _most_workers(programs: Programs) -> int:
    """How many workers get a slot: all that the job may have."""
    return programs.workers if programs.worker_range is None else programs.worker_range.most


def check_listening(addresses: Mapping[str, str], environment: Mapping[str, str], *, tls: bool) -> None:
    """Raises ConfigError when processes would listen beyond loopback for everybody, unless the settings say so."""
    settings = SecuritySettings.from_environment(environment)
    if tls or settings.insecure or (settings.tls and settings.authenticates):
        return
    for name, address in addresses.items():
        if not is_loopback(address):
            raise ConfigError(
                f"the processes on {name} would listen on {address} without TLS and tokens",
                expected="--tls, or the files of docs/security.md in PS_TLS_… and PS_TOKEN_FILE",
                remedy="give --tls, or --insecure where everybody who reaches the hosts is trusted",
            )


def describe(job: HostsJob) -> str:
    """Which processes run on which host."""
    return "; ".join(f"{host.name}: {_on(host, job)}" for host in job.hosts)


def _on(host: HostEntry, job: HostsJob) -> str:
    here = [process for process, other in job.placed.items() if other is host]
    words = []
    for part in ProcessRole:
        numbers = [process.index for process in here if process.part is part]
        if part is ProcessRole.COORDINATOR and numbers:
            words.append(part.value)
        elif numbers:
            words.append(f"{part.value} {', '.join(map(str, numbers))}")
    return ", ".join(words)


def passed(environ: Mapping[str, str], asked: Iterable[str]) -> dict[str, str]:
    """The variables for the processes on all hosts: PS_…, except those that are options of ps-run, and OMP_NUM_THREADS.

    ``asked``: NAME, which is set in ``environ``, or NAME=VALUE. Raises ConfigError.
    """
    sent = {
        name: value
        for name, value in environ.items()
        if name == THREADS_VARIABLE or (name.startswith("PS_") and not name.startswith("PS_RUN_"))
    }
    for text in asked:
        name, equals, value = text.partition("=")
        if not name or (not equals and name not in environ):
            raise ConfigError(
                f"--env {text}: no such variable",
                expected="the name of a variable that is set, or NAME=VALUE",
                remedy="set it, or leave --env out",
            )
        sent[name] = value if equals else environ[name]
    return sent
