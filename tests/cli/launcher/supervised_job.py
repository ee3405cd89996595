"""A supervisor without processes, moved by hand."""

from __future__ import annotations

from typing import Any

from ps_server.cli.launcher.events import (
    Command,
    CoordinatorReady,
    DeadlinePassed,
    Exited,
    ProcessName,
    ProcessRole,
    Say,
)
from ps_server.cli.launcher.supervisor import JobPlan, JobSupervisor

COORDINATOR = ProcessName(ProcessRole.COORDINATOR)
SHARD = ProcessName(ProcessRole.SHARD, 0)
WORKERS = (ProcessName(ProcessRole.WORKER, 0), ProcessName(ProcessRole.WORKER, 1))
EVALUATOR = ProcessName(ProcessRole.EVALUATOR, 0)


class Job:
    """A supervisor with a hand-driven clock and what it has said so far."""

    def __init__(self, shards: int = 1, workers: int = 2, **plan: Any) -> None:
        self.supervisor = JobSupervisor(JobPlan(shards, workers, **plan))
        self.now = 100.0
        self.said: list[str] = []
        self.started = self.supervisor.start(self.now)

    def see(self, event) -> list[Command]:
        """The commands but for what is said."""
        commands = self.supervisor.handle(event, self.now)
        self.said += [command.text for command in commands if isinstance(command, Say)]
        return [command for command in commands if not isinstance(command, Say)]

    def ready(self) -> Job:
        self.see(CoordinatorReady())
        return self

    def exits(self, process: ProcessName, code: int = 0) -> list[Command]:
        return self.see(Exited(process, code))

    def late(self) -> list[Command]:
        assert self.supervisor.deadline is not None
        self.now = self.supervisor.deadline
        return self.see(DeadlinePassed())
