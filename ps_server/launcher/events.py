"""The words between the supervisor, which decides, and the runner, which does: processes, events, commands."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass


class Part(enum.Enum):
    """What a process of the job is."""

    COORDINATOR = "coordinator"
    SHARD = "shard"
    WORKER = "worker"
    EVALUATOR = "evaluator"


SERVERS = frozenset({Part.COORDINATOR, Part.SHARD})
SCRIPTS = frozenset({Part.WORKER, Part.EVALUATOR})


@dataclass(frozen=True, slots=True)
class ProcessName:
    """One place in the job; a restarted worker keeps it."""

    part: Part
    index: int = 0

    def __str__(self) -> str:
        return self.part.value if self.part is Part.COORDINATOR else f"{self.part.value} {self.index}"


@dataclass(frozen=True, slots=True)
class CoordinatorReady:
    """Event: the coordinator answers."""


@dataclass(frozen=True, slots=True)
class Exited:
    """Event: a process ended. ``code`` is its exit code, or minus the signal that killed it."""

    process: ProcessName
    code: int
    #: The most memory it had, as the kernel counts it; 0: not known.
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Event: ps-run itself received a signal."""

    signal: signal.Signals


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """Event: ``Supervisor.deadline`` lies in the past."""


Event = CoordinatorReady | Exited | Interrupted | DeadlinePassed


@dataclass(frozen=True, slots=True)
class Start:
    """Command: start this process."""

    process: ProcessName


@dataclass(frozen=True, slots=True)
class Send:
    """Command: send this process a signal."""

    process: ProcessName
    signal: signal.Signals


@dataclass(frozen=True, slots=True)
class Say:
    """Command: tell the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Command: nothing lives any more; exit with ``code``."""

    code: int


Command = Start | Send | Say | Finish
