"""Processes forked from the one that calls, which has imported what they need."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping

from tests.recovery.zygote import PATIENCE_SECONDS, finish


class Program:
    """``work`` in a process forked from this one, with ``environment`` added to its own."""

    def __init__(self, work: Callable[[], None], environment: Mapping[str, str]) -> None:
        self.pid = os.fork()
        if not self.pid:
            os.environ.update(environment)
            finish(work)
        #: The exit code, negative for a signal, once it was asked for and there.
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        """The exit code, once it has ended; subprocess.TimeoutExpired where it does not in time."""
        pause = threading.Event()
        for _ in range(int(seconds / 0.01)):
            if (code := self.poll()) is not None:
                return code
            pause.wait(0.01)
        raise subprocess.TimeoutExpired(str(self.pid), seconds)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)
