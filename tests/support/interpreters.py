"""Python with the packages of this project already imported: a process that begins in 50 ms instead of seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import IO

import psutil

from ps_protocol.launch.life import VARIABLE as LIFE_VARIABLE
from tests.recovery.zygote import PATIENCE_SECONDS, PYTHON, Zygote, shared


class Interpreter:
    """``python *arguments`` in a process of its own, forked; used by the thread of the test, until ``close``.

    Its standard error is the test's. OMP_NUM_THREADS is 1.
    """

    def __init__(self, *arguments: str, zygote: Zygote | None = None, **environment: str) -> None:
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        try:
            files = (theirs_in, theirs_out, 2)
            self._process = (zygote or shared()).start(PYTHON, arguments, environment, files)
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self.stdin = os.fdopen(ours_in, "w")
        self.stdout = os.fdopen(ours_out)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """The exit code, once it has ended."""
        return self._process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End it, if it lives."""
        self.kill()
        self.wait()
        self.stdin.close()
        self.stdout.close()


def run(*arguments: str, seconds: float = PATIENCE_SECONDS, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python *arguments`` in a process of its own, forked, from its beginning to its end."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err, Path(os.devnull).open() as nothing:
        files = (nothing.fileno(), out.fileno(), err.fileno())
        code = shared().start(PYTHON, arguments, environment, files).wait(seconds)
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), err.read())


def alive() -> list[int]:
    """Processes forked for this test session that have not ended."""
    children = psutil.Process(shared().pid).children()
    return [child.pid for child in children if _lives(child)]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Popen:
    """A ``subprocess.Popen`` of ``sys.executable``, as programs of this repository use it, that is forked.

    ``env`` is added to the environment of the tests. No other descriptors are passed, and what names one is left out.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: None,
        stdout: IO[bytes],
        stderr: IO[bytes],
        env: Mapping[str, str],
        pass_fds: Sequence[int] = (),
    ) -> None:
        executable, *arguments = command
        env = {name: value for name, value in env.items() if name != LIFE_VARIABLE}
        assert executable == sys.executable
        with Path(os.devnull).open() as nothing:
            files = (nothing.fileno(), stdout.fileno(), stderr.fileno())
            self._process = shared().start(PYTHON, arguments, env, files)
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """As of the newest ``poll`` or ``wait``."""
        return self._process.code

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        """The exit code, once it has ended."""
        return self._process.wait(seconds)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        self._process.send(number)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


#: What a program may have in the place of the module ``subprocess``.
FORKING = SimpleNamespace(Popen=Popen, DEVNULL=None, TimeoutExpired=AssertionError)
