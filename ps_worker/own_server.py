"""One server as a child process, and what it has said last."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress

_LINES = 5
"""How many lines of its log an error quotes."""


class OwnServer:
    """A process whose output is passed on to standard error, by a thread that ends with it.

    Called from the user's thread; ``ended`` from any.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """``name``: for errors, such as "shard 0". ``process`` has a pipe as its standard output."""
        self._name = name
        self._process = process
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._told_to_end = False
        #: How it ended by itself; empty: it runs, or was told to end.
        self.ended = ""
        self._relay = threading.Thread(target=self._pass_on, name=f"output of {name}", daemon=True)
        self._relay.start()

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    @property
    def last_lines(self) -> str:
        """What it has said last, for an error."""
        lines = " | ".join(self._lines)
        return f"its log ends with: {lines}" if lines else "its log is empty"

    def join(self, timeout_seconds: float | None = None) -> bool:
        """Whether it has ended, after at most ``timeout_seconds``; None: as long as it runs."""
        self._relay.join(timeout_seconds)
        return not self._relay.is_alive()

    def end(self, grace_seconds: float) -> int:
        """SIGTERM, and SIGKILL where it lives ``grace_seconds`` later; its exit code, when it has ended."""
        self._told_to_end = True
        self._process.terminate()
        try:
            self._process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._relay.join()
        return self._process.returncode

    def kill(self) -> None:
        """SIGKILL, which ends one that is stopped, too."""
        self._process.kill()

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self._lines.append(line.decode(errors="replace").rstrip())
                # What servers print is no output of the script.
                with suppress(OSError, ValueError, AttributeError):
                    os.write(sys.stderr.fileno(), line)
        code = self._process.wait()
        if not self._told_to_end:
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            self.ended = f"{self._name} {how}"
