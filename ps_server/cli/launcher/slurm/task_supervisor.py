"""Decides which processes of one task of Slurm are started, signalled and restarted, and its exit code."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from ps_protocol.client.coordinator import EXIT_UNSAVED
from ps_protocol.launch.restarts import Restarts
from ps_server.cli.launcher.events import (
    SCRIPTS,
    SERVERS,
    CannotAsk,
    Command,
    CoordinatorReady,
    DeadlinePassed,
    Event,
    Exited,
    Finish,
    Interrupted,
    ProcessName,
    ProcessRole,
    Say,
    Scaled,
    Send,
    ServerHangs,
    StartProcess,
    WorkersWanted,
)
from ps_server.cli.launcher.hanging import HangingServers, end_hanging
from ps_server.cli.launcher.supervisor import GRACE_SECONDS, Stage, describe_exit, shell_code

SERVER_DELAY_SECONDS = 5.0
"""Servers outlive a signal by so much, for the workers of all tasks to leave them."""

SERVER_GRACE_SECONDS = 20.0
"""Between SIGTERM and SIGKILL for servers: together with the delay below Slurm's usual KillWait of 30 s."""


class TaskSupervisor:
    """A task's part of the job; the interface and the thread of ``Supervisor``. Does no I/O.

    Servers end by themselves with code 0 when the job is finished. The task ends when all its processes have.
    """

    def __init__(self, processes: Sequence[ProcessName], worker_restarts: int, server_restarts: int) -> None:
        self._processes = processes
        self._live: set[ProcessName] = set()
        self._restarts = {
            process: Restarts(server_restarts if process.part in SERVERS else worker_restarts) for process in processes
        }
        self._pausing: dict[ProcessName, float] = {}
        self._exit_code: int | None = None
        self._stage_ends: float | None = None
        self._hanging = HangingServers()
        self.stage = Stage.RUNNING
        self.failures: list[str] = []

    @property
    def restarts_workers(self) -> bool:
        """As of ``Supervisor``, of this task."""
        return any(each.total for process, each in self._restarts.items() if process.part is ProcessRole.WORKER)

    @property
    def deadline(self) -> float | None:
        """As of ``Supervisor``."""
        due = [*self._pausing.values(), *([] if self._stage_ends is None else [self._stage_ends])]
        return min(due, default=None)

    def start(self, now: float) -> list[Command]:
        """Start every process of the task."""
        return [self._start(process, now) for process in self._processes]

    def handle(self, event: Event, now: float) -> list[Command]:
        """The commands for ``event``, in order."""
        match event:
            case Exited():
                return self._on_exit(event, now)
            case Interrupted(signum):
                return self._on_interrupt(signum, now)
            case DeadlinePassed():
                return self._on_deadline(now)
            case WorkersWanted(ranks):
                running = self.stage is Stage.RUNNING
                return end_hanging(ranks, self._live, self._restarts.__getitem__, now) if running else []
            case ServerHangs():
                return self._hanging.end(event, self._live) if self.stage is Stage.RUNNING else []
            case CoordinatorReady() | Scaled() | CannotAsk():
                return []

    def _start(self, process: ProcessName, now: float) -> StartProcess:
        self._live.add(process)
        self._restarts[process].started(process, now)
        return StartProcess(process)

    def _on_exit(self, event: Exited, now: float) -> list[Command]:
        process, code = event.process, event.code
        self._live.discard(process)
        hung = self._hanging.ended(process)
        if code == 0 or self.stage is not Stage.RUNNING:
            return self._advance(now)
        how = f"{process} {'hung and was killed' if hung else event.why or describe_exit(code, event.peak_bytes)}"
        self.failures.append(how)
        if hung is not None and hung.replaced:
            return [
                Say(f"{how}; another process serves in its place"),
                *self._advance(now),
            ]
        restarts = self._restarts[process]
        # A server that fails at its first start has wrong options or damaged data.
        hopeless = process.part in SERVERS and code > 0 and restarts.never_lived(process, now)
        # One whose job is finished, but for its last checkpoint, would begin another run.
        hopeless = hopeless or (process.part is ProcessRole.COORDINATOR and code == EXIT_UNSAVED)
        pause_seconds = None if hopeless else restarts.take(process, now)
        if pause_seconds is None:
            return self._end(shell_code(code), f"{how}; ending this task", signal.SIGTERM, now)
        self._pausing[process] = now + pause_seconds
        return [Say(f"{how}; starting it again (restart {restarts.used} of {restarts.total})")]

    def _on_interrupt(self, signum: signal.Signals, now: float) -> list[Command]:
        if self.stage is not Stage.RUNNING:
            return self._signal(signal.SIGKILL, *ProcessRole) if signum is signal.SIGINT else []
        return self._end(128 + signum, f"received {signum.name}; ending this task", signum, now)

    def _on_deadline(self, now: float) -> list[Command]:
        due = sorted((process for process, when in self._pausing.items() if when <= now), key=str)
        for process in due:
            del self._pausing[process]
        commands: list[Command] = [self._start(process, now) for process in due]
        if self._stage_ends is None or self._stage_ends > now:
            return commands
        if self.stage is Stage.LEAVING:
            self.stage, self._stage_ends = Stage.STOPPING, now + SERVER_GRACE_SECONDS
            return [*commands, *self._signal(signal.SIGKILL, *SCRIPTS), *self._signal(signal.SIGTERM, *SERVERS)]
        self._stage_ends = None
        return [*commands, *self._signal(signal.SIGKILL, *ProcessRole)]

    def _end(self, code: int, text: str, signum: signal.Signals, now: float) -> list[Command]:
        self._exit_code = code
        self._pausing.clear()
        self.stage, self._stage_ends = Stage.LEAVING, now + max(GRACE_SECONDS, SERVER_DELAY_SECONDS)
        kind = signal.SIGINT if signum is signal.SIGINT else signal.SIGTERM
        return [Say(text), *self._signal(kind, *SCRIPTS), *self._advance(now)]

    def _advance(self, now: float) -> list[Command]:
        if self._live or self._pausing:
            return []
        self.stage, self._stage_ends = Stage.FINISHED, None
        return [Finish(self._exit_code or 0)]

    def _signal(self, signum: signal.Signals, *parts: ProcessRole) -> list[Command]:
        chosen = (process for process in self._live if process.part in parts)
        return [Send(process, signum) for process in sorted(chosen, key=str)]
