"""Decides which processes of one task of Slurm are started, signalled and restarted, and its exit code. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from ps_protocol.client.coordinator import EXIT_UNSAVED
from ps_protocol.launch.restarts import Restarts
from ps_server.cli.launcher import times
from ps_server.cli.launcher.events import SCRIPTS, SERVERS, Command, Exited, ProcessName, ProcessRole, Say
from ps_server.cli.launcher.supervisor import Stage, Supervisor, how_it_ended, shell_code


class TaskSupervisor(Supervisor):
    """A task's part of a job. Each process has restarts of its own.

    Servers end by themselves with code 0 when the job is finished. The task ends when all its processes have.
    """

    def __init__(self, processes: Sequence[ProcessName], worker_restarts: int, server_restarts: int) -> None:
        super().__init__(Stage.RUNNING)
        self._processes = {
            process: Restarts(server_restarts if process.part in SERVERS else worker_restarts) for process in processes
        }

    @property
    def restarts_workers(self) -> bool:
        """Whether failed workers of this task are started again."""
        return any(each.total for process, each in self._processes.items() if process.part is ProcessRole.WORKER)

    def start(self, now: float) -> list[Command]:
        """Start every process of the task."""
        return [self._start(process, now) for process in self._processes]

    def _restarts(self, process: ProcessName) -> Restarts:
        return self._processes[process]

    def _on_exit(self, event: Exited, now: float) -> list[Command]:
        process, code = event.process, event.code
        self._live.discard(process)
        hung = self._killed.pop(process, None)
        if code == 0 or self.stage is not Stage.RUNNING:
            return self._advance(now)
        how = how_it_ended(event, hung)
        self.failures.append(how)
        if hung is not None and hung.replaced:
            return [Say(f"{how}; another process serves in its place"), *self._advance(now)]
        # A server that fails at its first start has wrong options or damaged data.
        hopeless = process.part in SERVERS and code > 0 and self._restarts(process).never_lived(process, now)
        # One whose job is finished, but for its last checkpoint, would begin another run.
        hopeless = hopeless or (process.part is ProcessRole.COORDINATOR and code == EXIT_UNSAVED)
        again = [] if hopeless else self._again(process, how, now)
        return again or self._end(
            shell_code(code),
            f"{how}; ending this task",
            now,
            grace_seconds=times.GRACE_SECONDS,
        )

    def _words_of_interrupt(self, signum: signal.Signals) -> tuple[str, float]:
        return f"received {signum.name}; ending this task", times.GRACE_SECONDS

    def _on_stage_end(self, now: float) -> list[Command]:
        if self.stage is Stage.LEAVING:
            self.stage, self._stage_ends = Stage.STOPPING, now + times.TASK_GRACE_SECONDS
            return [*self._signal(signal.SIGKILL, *SCRIPTS), *self._signal(signal.SIGTERM, *SERVERS)]
        return self._signal(signal.SIGKILL, *ProcessRole)

    def _advance(self, now: float) -> list[Command]:
        return [] if self._live or self._pausing else self._finish()
