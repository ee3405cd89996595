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
from ps_server.cli.launcher.output.lines import LineSplitter

READ_BYTES = 1 << 16


class Child:
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
        self.name = name
        #: Its peak memory; known when it has ended.
        self.peak_bytes = 0
        #: The read end of the process's standard output and error.
        self.output, theirs = os.pipe()
        os.set_blocking(self.output, False)
        self._log = log
        self._splitter = LineSplitter()
        try:
            self._popen = subprocess.Popen(
                shim.command(command),
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
                env=environment,
                process_group=0,
                pass_fds=inherited,
            )
        except BaseException:
            os.close(self.output)
            raise
        finally:
            os.close(theirs)

    def read(self) -> list[str] | None:
        """The complete lines that have arrived, after one read; None without data and at the end."""
        try:
            data = os.read(self.output, READ_BYTES)
        except BlockingIOError:
            return None
        if not data:
            return None
        if self._log is not None:
            self._log.write(data)
        return self._splitter.feed(data)

    def read_rest(self) -> list[str]:
        """After the end: the rest of the pipe and an incomplete last line. Closes the pipe."""
        lines: list[str] = []
        while (more := self.read()) is not None:
            lines += more
        os.close(self.output)
        return lines + self._splitter.flush()

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
