"""The hosts of a job and the connections to them: where ps-run starts processes when it has ``--hosts``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from ps_protocol import times
from ps_protocol.security.settings import VARIABLES
from ps_server.cli.launcher.events import SERVERS, ProcessName, ProcessRole
from ps_server.cli.launcher.hosts.link import HostLink, RemoteProcess
from ps_server.cli.launcher.hosts.messages import Begin, Launch, Ready
from ps_server.cli.launcher.hosts.placing import THREADS_VARIABLE, HostEntry, addresses, threads
from ps_server.cli.launcher.job_folder import LOCK

PROGRAM = "ps_server.cli.launcher.hosts.host_program"


_FILES = frozenset(VARIABLES[name] for name in ("tls_cert", "tls_key", "tls_ca", "token_file"))

_OPENSSH = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20")
"""No terminal, no questions. Options of the user come before them, and win."""


@dataclass(frozen=True, slots=True)
class HostsJob:
    """A job on several hosts."""

    #: The host of each process; the first host is the coordinator's.
    placed: Mapping[ProcessName, HostEntry]
    hosts: Sequence[HostEntry]
    #: The interpreter on every host.
    python: str
    #: The script's path; empty: a module.
    script: str
    data_dir: Path | None = None
    checkpoint_dir: Path | None = None
    ssh: str = "ssh"
    silence_seconds: float = times.PATIENCE_SECONDS
    working_folder: str = field(default_factory=os.getcwd)


def connect_command(ssh: str, host: str, python: str) -> list[str]:
    """The command that runs the host's program on ``host``. No secret is in it."""
    program, *options = shlex.split(ssh)
    if os.path.basename(program) == "ssh":  # noqa: PTH119 -- the name in a command, not a path
        options += _OPENSSH
    return [program, *options, host, *map(shlex.quote, (python, "-P", "-m", PROGRAM))]


class Fleet:
    """Used by the runner's thread. A context: with its end all connections are closed, and the processes end."""

    def __init__(self, job: HostsJob, passed: Mapping[str, str]) -> None:
        """``passed``: the variables that went into the environment of processes."""
        self._job = job
        self._shares_cores = THREADS_VARIABLE not in passed
        self._links: dict[str, HostLink] = {}
        self._ready: dict[str, Ready] = {}
        #: The address of each host, by name.
        self.addresses: Mapping[str, str] = {}

    def __enter__(self) -> Self:
        """Connect to all hosts at once. Raises PsError for the first that fails; then nothing is left."""
        try:
            for host in self._job.hosts:
                self._link(host)
            futures = [link.ready for link in self._links.values()]
            wait(futures, return_when=FIRST_EXCEPTION)
            if failed := [each.exception() for each in futures if each.done() and each.exception() is not None]:
                raise failed[0]  # type: ignore[misc]  # not None
            self._ready = {name: link.ready.result() for name, link in self._links.items()}
            self.addresses = addresses(self._job.hosts, self._ready)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for link in self._links.values():
            link.leave()
        for link in self._links.values():
            link.close()

    @property
    def goes_on(self) -> bool:
        """Whether the coordinator's host has the state of an earlier job."""
        return self._ready[self._job.hosts[0].name].used_before

    @property
    def identity(self) -> str:
        """Names the data directory of the coordinator's host."""
        first = self._job.hosts[0].name
        return f"{first}:{self._ready[first].data_dir}"

    @property
    def names(self) -> list[str]:
        """All names and addresses of the hosts, for certificates."""
        return list(dict.fromkeys([*self.addresses, *self.addresses.values()]))

    def address_of(self, process: ProcessName) -> str:
        """The address at which others reach ``process``."""
        return self.addresses[self._job.placed[process].name]

    def coordinator(self) -> str | None:
        """host:port of the coordinator, once it serves."""
        return self._links[self._job.hosts[0].name].coordinator or None

    def look(self) -> bool:
        """As of ``Machines``: no process waits."""
        return False

    def start(
        self,
        process: ProcessName,
        command: Sequence[str],
        environment: Mapping[str, str],
        secured: Mapping[str, str],
        log: BinaryIO | None,
    ) -> RemoteProcess:
        """Start ``process`` on its host, to which this connects again where the connection was lost."""
        host = self._job.placed[process]
        plain, files = contents(secured)
        added = dict(environment) | plain
        if self._shares_cores and process.part in (ProcessRole.WORKER, ProcessRole.EVALUATOR):
            added[THREADS_VARIABLE] = str(threads(host, self._job.placed, self._ready[host.name].cores))
        return self._link(host).start(Launch(process, tuple(command), added, files), log)

    def _link(self, host: HostEntry) -> HostLink:
        link = self._links.get(host.name)
        if link is None or link.closed:
            if link is not None:
                link.close()
            command = connect_command(self._job.ssh, host.name, self._job.python)
            self._links[host.name] = HostLink(command, self._job.python, self._begin(host))
        return self._links[host.name]

    def _begin(self, host: HostEntry) -> Begin:
        job = self._job
        serves = any(process.part in SERVERS and other is host for process, other in job.placed.items())
        first = host is job.hosts[0]
        return Begin(
            host=host.name,
            working_folder=job.working_folder,
            script=job.script,
            data_dir=str(job.data_dir) if serves and job.data_dir else "",
            lock_name=LOCK if first else f"ps-run-{host.name}.lock",
            silence_seconds=job.silence_seconds,
            checkpoint_dir=str(job.checkpoint_dir) if serves and job.checkpoint_dir else "",
        )


def contents(secured: Mapping[str, str]) -> tuple[dict[str, str], dict[str, bytes]]:
    """``secured``, the variables of a process's own certificates and token: those that name no file, and the contents
    of the files by the variable that names each.
    """
    files = {name: Path(value).read_bytes() for name, value in secured.items() if name in _FILES}
    return {name: value for name, value in secured.items() if name not in _FILES}, files
