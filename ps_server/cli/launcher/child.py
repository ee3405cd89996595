"""One process of a job: it cannot outlive ps-run, is read without blocking, and is ended with its own children."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import BinaryIO

from ps_protocol.launch import shim
from ps_protocol.launch.life import LifePipe, StopWatch
from ps_server.cli.launcher.events import ProcessName, ProcessRole
from ps_server.cli.launcher.output.pipe import OutputPipe


class Child(OutputPipe):
    """Called by the runner's main thread only: the kernel kills a child when the *thread* that started it ends.

    The process leads a group of its own, so a Ctrl-C in the terminal reaches it through ps-run alone, once.
    """

    def __init__(
        self,
        name: ProcessName,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: BinaryIO | None,
        inherited: Sequence[int] = (),
        *,
        shows_life: bool = False,
    ) -> None:
        """Start it. ``inherited``: descriptors that it keeps open under the same numbers. ``shows_life``: it is one
        that hangs when it does not.
        """
        super().__init__(log)
        self.name = name
        self._life = LifePipe(time.monotonic()) if shows_life else None
        self._stops = StopWatch(time.monotonic()) if name.part is ProcessRole.SHARD else None
        #: Its peak memory; known when it has ended.
        self.peak_bytes = 0
        self.why = ""
        #: None: it is not started yet.
        self.pid: int | None = None
        if self._life is not None:
            environment, inherited = {**environment, **self._life.variables}, (*inherited, self._life.write_end)
        self._command, self._environment, self._inherited = command, environment, inherited
        self._popen: subprocess.Popen[bytes] | None = None
        try:
            self._begin()
        except BaseException:
            os.close(self.output)
            os.close(self._write_end)
            if self._life is not None:
                self._life.started()
                self._life.close()
            raise

    def send(self, signum: signal.Signals) -> None:
        """SIGTERM goes to the process, which ends its own helpers; SIGINT and SIGKILL go to its whole group."""
        if self.pid is None:
            return
        target = os.kill if signum is signal.SIGTERM else os.killpg
        with suppress(ProcessLookupError, PermissionError):
            target(self.pid, signum)

    def hangs(self) -> str:
        """Why it hangs; empty: it does not, or is none that shows it. Asked at least each second, of one that lives."""
        if self._stops is not None and self.pid is not None:
            return self._stops.hangs(self.pid, time.monotonic())
        return self._life.hangs(time.monotonic()) if self._life is not None else ""

    def poll(self) -> int | None:
        """Its exit code once it has ended, minus the signal that killed it. The rest of its group is killed."""
        if self.pid is None or os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        # Before it is reaped: until then its number cannot be reused.
        self.send(signal.SIGKILL)
        _, status, usage = os.wait4(self.pid, 0)
        self._watch_no_more()
        code = os.waitstatus_to_exitcode(status)
        if self._popen is not None:
            self._popen.returncode = code
        # Linux counts it in units of 1,024 bytes (getrusage(2)).
        self.peak_bytes = usage.ru_maxrss * 1024
        return code

    def kill(self) -> None:
        """Kill it and wait for its end."""
        self.send(signal.SIGKILL)
        if self.pid is not None:
            _, status = os.waitpid(self.pid, 0)
            if self._popen is not None:
                self._popen.returncode = os.waitstatus_to_exitcode(status)
        self._watch_no_more()
        os.close(self.output)

    def _watch_no_more(self) -> None:
        if self._life is not None:
            self._life.close()
            self._life = None

    def _begin(self) -> None:
        """Start it as a program."""
        self._popen = subprocess.Popen(
            shim.command(self._command),
            stdin=subprocess.DEVNULL,
            stdout=self._write_end,
            stderr=self._write_end,
            env=self._environment,
            process_group=0,
            pass_fds=self._inherited,
        )
        self._begun(self._popen.pid)

    def _begun(self, pid: int) -> None:
        self.pid = pid
        os.close(self._write_end)
        if self._life is not None:
            self._life.started()
