"""Events and commands between the supervisor, which decides, and the runner, which acts."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass

from ps_protocol.cluster.scaling import ScaleOrder


class ProcessRole(enum.Enum):
    """The role of a process of the job."""

    COORDINATOR = "coordinator"
    SHARD = "shard"
    WORKER = "worker"
    EVALUATOR = "evaluator"


SERVERS = frozenset({ProcessRole.COORDINATOR, ProcessRole.SHARD})
SCRIPTS = frozenset({ProcessRole.WORKER, ProcessRole.EVALUATOR})


@dataclass(frozen=True, slots=True)
class ProcessName:
    """One place in the job; a restarted worker keeps it."""

    part: ProcessRole
    index: int = 0

    def __str__(self) -> str:
        return self.part.value if self.part is ProcessRole.COORDINATOR else f"{self.part.value} {self.index}"


@dataclass(frozen=True, slots=True)
class CoordinatorReady:
    """Event: the coordinator answers."""


@dataclass(frozen=True, slots=True)
class Exited:
    """Event: a process ended. ``code`` is its exit code, or minus the signal that killed it."""

    process: ProcessName
    code: int
    #: Its peak memory, as the kernel counts it; 0: not known.
    peak_bytes: int = 0
    #: How it ended, where the code does not tell.
    why: str = ""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Event: ps-run itself received a signal."""

    signal: signal.Signals


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """Event: ``Supervisor.deadline`` has passed."""


@dataclass(frozen=True, slots=True)
class WorkersWanted:
    """Event: the coordinator asks for the workers of these ranks, which it has lost."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServerHangs:
    """Event: the process of a server lives, and serves no more."""

    process: ProcessName
    why: str
    #: Another process, which ps-run has not started, has its place.
    replaced: bool = False


@dataclass(frozen=True, slots=True)
class Scaled:
    """Event: the coordinator tells what is to run, and what the job has."""

    order: ScaleOrder


@dataclass(frozen=True, slots=True)
class CannotAsk:
    """Event: the coordinator, which would tell what is to run, cannot be asked."""


Event = CoordinatorReady | Exited | Interrupted | DeadlinePassed | WorkersWanted | ServerHangs | Scaled | CannotAsk


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Command: start this process."""

    process: ProcessName


@dataclass(frozen=True, slots=True)
class Send:
    """Command: send this process a signal."""

    process: ProcessName
    signal: signal.Signals


@dataclass(frozen=True, slots=True)
class Say:
    """Command: show a message."""

    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Command: all processes have ended; exit with ``code``."""

    code: int


Command = StartProcess | Send | Say | Finish
