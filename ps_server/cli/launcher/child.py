"""One process of a job: it cannot outlive ps-run, is read without blocking, and is ended with its own children."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import BinaryIO

from ps_protocol import shim
from ps_server.cli.launcher.events import ProcessName
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
    ) -> None:
        """Start it. ``inherited``: descriptors that it keeps open under the same numbers."""
        super().__init__(log)
        self.name = name
        #: Its peak memory; known when it has ended.
        self.peak_bytes = 0
        self.why = ""
        try:
            self._popen = subprocess.Popen(
                shim.command(command),
                stdin=subprocess.DEVNULL,
                stdout=self._write_end,
                stderr=self._write_end,
                env=environment,
                process_group=0,
                pass_fds=inherited,
            )
        except BaseException:
            os.close(self.output)
            raise
        finally:
            os.close(self._write_end)

    def send(self, signum: signal.Signals) -> None:
        """SIGTERM goes to the process, which ends its own helpers; SIGINT and SIGKILL go to its whole group."""
        target = os.kill if signum is signal.SIGTERM else os.killpg
        with suppress(ProcessLookupError, PermissionError):
            target(self._popen.pid, signum)

    def poll(self) -> int | None:
        """Its exit code once it has ended, minus the signal that killed it. The rest of its group is killed."""
        if os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        # Before it is reaped: until then its number cannot be reused.
        self.send(signal.SIGKILL)
        _, status, usage = os.wait4(self._popen.pid, 0)
        self._popen.returncode = os.waitstatus_to_exitcode(status)
        # Linux counts it in units of 1,024 bytes (getrusage(2)).
        self.peak_bytes = usage.ru_maxrss * 1024
        return self._popen.returncode

    def kill(self) -> None:
        """Kill it and wait for its end."""
        self.send(signal.SIGKILL)
        self._popen.wait()
        os.close(self.output)
