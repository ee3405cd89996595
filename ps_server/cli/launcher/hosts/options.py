"""The options of ps-run for a job on several hosts."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ps_protocol.errors import ConfigError
from ps_server.cli.launcher.hosts.entries import HostEntry, hosts_of, hosts_of_file
from ps_server.cli.options.common import clean_errors


@dataclass(frozen=True, slots=True)
class HostsOptions:
    """Where a job on several hosts runs."""

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
