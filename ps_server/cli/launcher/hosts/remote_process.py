"""One process of a job on another host, as the runner sees it: like a child of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

from ps_protocol.launch.child import OutputPipe
from ps_server.cli.launcher.events import ProcessName


class RemoteProcess(OutputPipe):
    """Used by the runner's thread, except what the thread of its connection calls: ``begun``, ``hanging``, ``wrote``
    and ``ended``.
    """

    def __init__(
        self, name: ProcessName, log: BinaryIO | None, tell: Callable[[signal.Signals], None], lose: Callable[[], None]
    ) -> None:
        """``tell`` has it sent a signal; ``lose`` ends the connection to its host, and so the process."""
        super().__init__(log)
        self.name = name
        self.peak_bytes = 0
        #: How it ended, where its exit code does not tell.
        self.why = ""
        #: On its host; None: not known yet.
        self.pid: int | None = None
        self._hangs = ""
        self._code: int | None = None
        self._tell, self._lose = tell, lose

    def send(self, signum: signal.Signals) -> None:
        """As of a child."""
        self._tell(signum)

    def poll(self) -> int | None:
        """As of a child."""
        return self._code

    def hangs(self) -> str:
        """As of a child; its host sees that."""
        return self._hangs

    def kill(self) -> None:
        """End its host's part of the job. The connection waits for the end."""
        self._lose()
        os.close(self.output)

    def wrote(self, data: bytes) -> None:
        """It printed ``data``; returns when the runner has room for it."""
        view = memoryview(data)
        with suppress(OSError):  # the runner has gone
            while view:
                view = view[os.write(self._write_end, view) :]

    def begun(self, pid: int) -> None:
        """Its host has started it, with this number."""
        self.pid = pid

    def hanging(self, why: str) -> None:
        """Its host says that it hangs."""
        self._hangs = why

    def ended(self, code: int, peak_bytes: int = 0, why: str = "") -> None:
        """It has ended; nothing comes after this."""
        self.peak_bytes, self.why = peak_bytes, why
        # Before the end of the pipe, which wakes the runner.
        self._code = code
        os.close(self._write_end)
