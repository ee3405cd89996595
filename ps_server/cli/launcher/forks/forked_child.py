"""A shard of this machine that is forked."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from ps_protocol.launch.child import Child
from ps_protocol.launch.commands import SHARD
from ps_protocol.launch.life import StopWatch
from ps_server.cli.launcher.events import ProcessName
from ps_server.cli.launcher.forks.fork_server import ForkServer, ForkState


class ForkedChild(Child):
    """Forked from ``forks`` as soon as that has imported its modules; started as a program where that is lost."""

    def __init__(
        self,
        name: ProcessName,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: BinaryIO | None,
        inherited: Sequence[int],
        forks: ForkServer,
    ) -> None:
        """``command`` begins with ``SHARD``; the process keeps ``inherited`` open, under any numbers."""
        self._forks = forks
        #: The signal that ended it before it was started.
        self._ended_by: signal.Signals | None = None
        self._told_end = False
        super().__init__(name, command, environment, log, inherited, StopWatch)

    @property
    def waits(self) -> bool:
        """Whether it is not started yet, and a later ``poll`` starts it or tells its end."""
        return self.pid is None and not self._told_end

    def send(self, signum: signal.Signals) -> None:
        """As of every child; one that is not started yet will not be."""
        if self.pid is None:
            self._ended_by = signum
        super().send(signum)

    def poll(self) -> int | None:
        """As of every child; starts it, if it waits and can be."""
        if self.pid is None:
            if self._ended_by is not None:
                os.close(self._write_end)
                self._told_end = True
                return -self._ended_by
            self._begin()
        return super().poll()

    def kill(self) -> None:
        """As of every child."""
        if self.pid is None:
            os.close(self._write_end)
        super().kill()

    def _begin(self) -> None:
        state = self._forks.look()
        if state is ForkState.IMPORTING:
            return
        if state is ForkState.READY:
            files = (self._write_end, *self._inherited)
            arguments = self._command[len(SHARD) :]
            if (pid := self._forks.fork(SHARD, arguments, self._environment, files)) is not None:
                self._begun(pid)
                return
        super()._begin()
