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
    """Names a process of the job; a restarted one keeps the name."""

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
    #: How it ended, where the code does not show it.
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
    """Event: the coordinator has lost the workers of these ranks, and requests them."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServerHangs:
    """Event: the process of a server lives, and no longer serves."""

    process: ProcessName
    why: str
    #: A process that ps-run has not started has taken over its role.
    replaced: bool = False


@dataclass(frozen=True, slots=True)
class Scaled:
    """Event: the coordinator orders what is to run, and reports what the job has."""

    order: ScaleOrder


@dataclass(frozen=True, slots=True)
class CannotAsk:
    """Event: the coordinator cannot be asked what is to run."""


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
