"""A job of ps-run on several hosts, from its options to its exit code."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ps_protocol.errors import ConfigError
from ps_protocol.security.binding import is_loopback
from ps_protocol.security.settings import VARIABLES, SecuritySettings
from ps_server.cli.launcher.events import ProcessRole
from ps_server.cli.launcher.hosts.entries import HostEntry
from ps_server.cli.launcher.hosts.environment import passed
from ps_server.cli.launcher.hosts.fleet import Fleet, HostsJob
from ps_server.cli.launcher.hosts.options import HostsOptions
from ps_server.cli.launcher.hosts.placing import all_slots, spread
from ps_server.cli.launcher.programs import Programs, Script
from ps_server.cli.launcher.runner import Runner
from ps_server.cli.launcher.screen import Screen
from ps_server.cli.launcher.supervisor import Supervisor


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
    programs = replace(programs, servers=servers_on_hosts(command[0], programs))
    with Fleet(job, environment) as fleet:
        check_listening(fleet.addresses, environment, tls=programs.tls)
        programs = replace(programs, addresses={process: fleet.address_of(process) for process in placed})
        if job.data_dir is not None:
            digest = hashlib.blake2b(fleet.identity.encode(), digest_size=16)
            programs = replace(programs, lineage=digest.hexdigest())
        if fleet.goes_on:
            screen.say(f"continuing from the state in {fleet.identity}; use another --data-dir to begin a new job")
        screen.say(f"hosts: {describe(job)}")
        return Runner(supervisor, programs, screen, environment, log_dir, show_progress, place=fleet).run()


def _most_workers(programs: Programs) -> int:
    """How many workers have a place: every one that the job may have."""
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
