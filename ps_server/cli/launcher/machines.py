"""The machines on which ps-run starts processes: this one, or the hosts of ``hosts/``."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO, Protocol

from ps_protocol.launch.child import Child
from ps_protocol.launch.life import LifePipe, StopWatch
from ps_server.cli.launcher.events import SERVERS, ProcessName, ProcessRole
from ps_server.cli.launcher.forks import ForkedChild, ForkServer, ForkState
from ps_server.cli.launcher.job_folder import JobFolder

_WATCHES: Mapping[ProcessRole, type[LifePipe | StopWatch]] = {
    ProcessRole.COORDINATOR: LifePipe,
    ProcessRole.SHARD: StopWatch,
}
"""What notices that a server hangs."""


class JobProcess(Protocol):
    """A process of the job, as the runner sees it. ``output`` is readable when it has printed, and at its end."""

    name: ProcessName
    peak_bytes: int
    #: How it ended, where its exit code does not show it.
    why: str
    #: Its number on its host; None: not known.
    pid: int | None
    output: int

    def read(self) -> list[str] | None:
        """The lines that have arrived; None without data and at the end."""

    def read_rest(self) -> list[str]:
        """After the end: the last lines."""

    def send(self, signum: signal.Signals) -> None:
        """Send it a signal."""

    def poll(self) -> int | None:
        """Its exit code once it has ended, minus the signal that killed it."""

    def hangs(self) -> str:
        """Why it hangs, as far as this machine can detect; empty: it does not."""

    def kill(self) -> None:
        """Kill it."""


class Machines(Protocol):
    """What the runner asks of the machines on which it starts processes."""

    @property
    def goes_on(self) -> bool:
        """Whether there is state of an earlier job."""

    @property
    def names(self) -> Sequence[str]:
        """Names and addresses for certificates, beside those of loopback."""

    def coordinator(self) -> str | None:
        """host:port of the coordinator, once it serves."""

    def start(
        self,
        process: ProcessName,
        command: Sequence[str],
        environment: Mapping[str, str],
        secured: Mapping[str, str],
        log: BinaryIO | None,
    ) -> JobProcess:
        """Start ``process``. ``secured``: variables of its own certificate and token, which name files of ps-run."""

    def look(self) -> bool:
        """Whether a process was started that only a later ``poll`` begins."""


class ThisMachine:
    """Children of ps-run. With ``forks``, shards are forked from one process, which begins with the coordinator."""

    names: Sequence[str] = ()

    def __init__(
        self,
        job_folder: JobFolder | None = None,
        *,
        forks: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``say``: shows that the process that shards are forked from is lost."""
        self._coordinator: Child | None = None
        #: Inherited by every server, so that the next ps-run sees that one is still alive.
        self._server_descriptors = () if job_folder is None else (job_folder.lock,)
        self.goes_on = job_folder is not None and job_folder.used_before
        self._forking = forks
        self._forks: ForkServer | None = None
        self._forked: dict[ProcessName, ForkedChild] = {}
        self._say = say

    def coordinator(self) -> str | None:
        """As of ``Machines``."""
        return self._coordinator.address() or None if self._coordinator is not None else None

    def start(
        self,
        process: ProcessName,
        command: Sequence[str],
        environment: Mapping[str, str],
        secured: Mapping[str, str],
        log: BinaryIO | None,
    ) -> Child:
        """As of ``Machines``."""
        inherited = self._server_descriptors if process.part in SERVERS else ()
        if self._forking and process.part in SERVERS:
            forks = self._living_forks(environment)
            if process.part is ProcessRole.SHARD:
                self._forked[process] = ForkedChild(process, command, {**environment, **secured}, log, inherited, forks)
                return self._forked[process]
        watch, serves = _WATCHES.get(process.part), process.part is ProcessRole.COORDINATOR
        child = Child(process, command, {**environment, **secured}, log, inherited, watch, serves=serves)
        if serves:
            self._coordinator = child
        return child

    def look(self) -> bool:
        """As of ``Machines``."""
        if self._forks is not None:
            self._forks.look()
        return any(child.waits for child in self._forked.values())

    def end_forks(self) -> None:
        """Fork no more shards; does not wait for the end of what they were forked from. Repeatable."""
        if self._forks is not None:
            self._forks.end()

    def close(self) -> None:
        """End the process that shards are forked from. All others have ended."""
        if self._forks is not None:
            self._forks.close()

    def _living_forks(self, environment: Mapping[str, str]) -> ForkServer:
        """The process that shards are forked from: a new one where the last one is lost."""
        if self._forks is not None and self._forks.look() is ForkState.LOST:
            self._forks.close()
            self._forks = None
        if self._forks is None:
            self._forks = ForkServer(environment, self._say)
        return self._forks
