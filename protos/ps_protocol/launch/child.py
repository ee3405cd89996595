"""A child process: it dies with the thread that started it, and ends with its own children."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

from ps_protocol.launch import shim
from ps_protocol.launch.life import LifePipe, StopWatch

READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 16


class LineSplitter:
    """Splits the bytes of a pipe into lines, as a terminal would have shown them. Used by one thread.

    A line longer than 64 KB is split; an incomplete last line is kept.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that ``data`` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        return [_shown(line) for line in lines]

    def flush(self) -> list[str]:
        """The incomplete last line."""
        rest, self._rest = self._rest, b""
        return [_shown(rest)] if rest else []


def _shown(line: bytes) -> str:
    # A progress bar rewrites its line after each carriage return; only the last state is visible.
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")


class OutputPipe:
    """The read end of what one process writes. Used by one thread.

    ``output`` is readable when there is something to read, and at the end.
    """

    def __init__(self, log: BinaryIO | None) -> None:
        """``log`` gets a copy of all that is read."""
        self.output, self._write_end = os.pipe()
        os.set_blocking(self.output, False)
        self._log = log
        self._splitter = LineSplitter()

    def read_bytes(self) -> bytes | None:
        """What has arrived, up to 64 KB; None without data and at the end."""
        try:
            data = os.read(self.output, READ_BYTES)
        except BlockingIOError:
            return None
        if data and self._log is not None:
            self._log.write(data)
        return data or None

    def read(self) -> list[str] | None:
        """The complete lines that have arrived, after one read; None without data and at the end."""
        data = self.read_bytes()
        return None if data is None else self._splitter.feed(data)

    def read_rest(self) -> list[str]:
        """After the end: the rest of the pipe and an incomplete last line. Closes the pipe."""
        lines: list[str] = []
        while (more := self.read()) is not None:
            lines += more
        os.close(self.output)
        return lines + self._splitter.flush()


def start(
    command: Sequence[str], environment: Mapping[str, str], output: int, inherited: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start ``command``, which writes to the descriptor ``output`` and keeps those of ``inherited`` open.

    It dies with the calling thread. It leads a process group of its own, so a Ctrl-C in the terminal does not reach it.
    """
    return subprocess.Popen(
        shim.command(command),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
        process_group=0,
        pass_fds=inherited,
    )


class Child(OutputPipe):
    """Used by the thread that starts it."""

    def __init__(
        self,
        name: Any,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: BinaryIO | None = None,
        inherited: Sequence[int] = (),
        watch: type[LifePipe | StopWatch] | None = None,
        *,
        serves: bool = False,
    ) -> None:
        """Start it. ``inherited``: descriptors that it keeps open. ``watch``: what notices that it hangs.

        ``serves``: it is a server with the option --ready-file, which writes its address there. That is a pipe and no
        file: a process that is killed leaves none.
        """
        super().__init__(log)
        self.name = name
        self._watch = watch(time.monotonic()) if watch is not None else None
        #: Its peak memory; known when it has ended.
        self.peak_bytes = 0
        self.why = ""
        #: None: it is not started yet.
        self.pid: int | None = None
        if self._watch is not None:
            environment, inherited = {**environment, **self._watch.variables}, (*inherited, *self._watch.inherited)
        #: Readable when ``address`` is known, and at the end; None: it does not serve.
        self.ready: int | None = None
        self._address = b""
        self._ready_file: int | None = None
        if serves:
            self.ready, self._ready_file = os.pipe()
            os.set_blocking(self.ready, False)
            command = [*command, "--ready-file", f"/dev/fd/{self._ready_file}"]
            inherited = (*inherited, self._ready_file)
        self._command, self._environment, self._inherited = command, environment, inherited
        self._popen: subprocess.Popen[bytes] | None = None
        try:
            self._begin()
        except BaseException:
            os.close(self.output)
            self._close_theirs()
            self._close_ours()
            raise

    def send(self, signum: signal.Signals) -> None:
        """SIGTERM goes to the process, which ends its own helpers; SIGINT and SIGKILL go to its whole group."""
        if self.pid is None:
            return
        target = os.kill if signum is signal.SIGTERM else os.killpg
        with suppress(ProcessLookupError, PermissionError):
            target(self.pid, signum)

    def address(self) -> str:
        """host:port, as long as it serves; empty before."""
        if self.ready is None:
            return ""
        with suppress(BlockingIOError):
            self._address += os.read(self.ready, 4096)
        line, newline, _ = self._address.partition(b"\n")
        return line.decode().strip() if newline else ""

    def hangs(self) -> str:
        """Why it hangs; empty: it does not, or is not watched. Called at least each second while it lives."""
        if self._watch is None or self.pid is None:
            return ""
        return self._watch.hangs(self.pid, time.monotonic())

    def poll(self) -> int | None:
        """Its exit code once it has ended, minus the signal that killed it. The rest of its group is killed."""
        if self.pid is None or os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        # Before it is reaped: until then its number cannot be reused.
        self.send(signal.SIGKILL)
        _, status, usage = os.wait4(self.pid, 0)
        # Linux counts it in units of 1,024 bytes (getrusage(2)).
        self.peak_bytes = usage.ru_maxrss * 1024
        return self._ended(status)

    def kill(self) -> None:
        """Kill it and wait for its end."""
        self.send(signal.SIGKILL)
        if self.pid is not None:
            self._ended(os.waitpid(self.pid, 0)[1])
        os.close(self.output)

    def _ended(self, status: int) -> int:
        code = os.waitstatus_to_exitcode(status)
        if self._popen is not None:
            self._popen.returncode = code
        self._close_ours()
        return code

    def _begin(self) -> None:
        """Start it as a program."""
        self._popen = start(self._command, self._environment, self._write_end, self._inherited)
        self._begun(self._popen.pid)

    def _begun(self, pid: int) -> None:
        self.pid = pid
        self._close_theirs()

    def _close_theirs(self) -> None:
        """Close the ends of pipes that the process has now."""
        os.close(self._write_end)
        if self._watch is not None:
            self._watch.started()
        if self._ready_file is not None:
            os.close(self._ready_file)

    def _close_ours(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self.ready is not None:
            os.close(self.ready)
            self.ready = None
