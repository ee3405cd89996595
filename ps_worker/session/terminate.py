"""SIGTERM inside ``with connect()`` unwinds the block, so that the worker leaves the cluster before it ends."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from ps_worker.session.reporting import log

EXIT_CODE = 128 + signal.SIGTERM

_REASON_CHARACTERS = 200


class Terminated(SystemExit):
    """SIGTERM arrived. A SystemExit, so a script that does not catch it ends with exit code 143 and no traceback."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)

    def __str__(self) -> str:
        return "the process was told to end (SIGTERM)"


class TerminationGuard:
    """Raises ``Terminated`` in the main thread on SIGTERM between ``install`` and ``remove``.

    Both are called from the user's thread. A handler of the user stays, and other threads are not affected.
    """

    def __init__(self) -> None:
        self._installed = False
        self._pid = os.getpid()

    def install(self) -> None:
        """Handle SIGTERM where it has its default effect and this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)
            self._installed = True

    def remove(self) -> None:
        """Restore the default effect of SIGTERM."""
        if self._installed and threading.current_thread() is threading.main_thread():
            self._installed = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # A forked child (a DataLoader's process) inherits the handler, and ends at once: it is not the worker.
        if os.getpid() != self._pid:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        raise Terminated


def leave_reason(error: BaseException | None) -> str:
    """The reason why a worker leaves; empty at a clean end."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return ""
    return f"{type(error).__name__}: {error}".removesuffix(": ")[:_REASON_CHARACTERS]


def warn_of_no_step(rank: int, call: str) -> None:
    """Say that a worker leaves a job whose parameters it has not trained: its script never called ``call``."""
    log.warning(
        "worker %d leaves without a step: the script never called %s, and its parameters are as they were", rank, call
    )
