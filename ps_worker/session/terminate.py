"""SIGTERM inside ``with connect()`` unwinds the block, so that the worker leaves the cluster before it ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ps_protocol.errors import PsError
from ps_worker.session.reporting import log

EXIT_CODE = 128 + signal.SIGTERM

_REASON_CHARACTERS = 200


class Terminated(SystemExit):
    """SIGTERM arrived. A SystemExit, so a script that does not catch it ends with exit code 143 and no traceback."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)

    def __str__(self) -> str:
        return "the process received SIGTERM"


class TerminationGuard:
    """Raises ``Terminated`` in the main thread on SIGTERM between ``install`` and ``remove``.

    Both are called from the user's thread. A handler of the user stays in place; other threads are not affected. During
    a critical section, such as a step over all shards, SIGTERM waits for the end of the section: ``patience_seconds``
    at most, and not at all when it arrives a second time.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        self._installed = False
        self._pid = os.getpid()
        #: Sections under way; changed by the training thread. A step counts itself, without a call of this module.
        self.sections = 0
        #: SIGTERM waits for the end of the sections.
        self.waits = False
        self._timer: threading.Timer | None = None
        #: The next signal is the timer's.
        self._expires = False

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
        if self._expires:
            self._expires = False
            if not self.waits:
                return
            log.warning("step.cut", "SIGTERM: this worker leaves in the middle of a step, which took too long")
        elif self.sections and not self.waits:
            self._wait()
            return
        self._stop_waiting()
        raise Terminated

    def end_section(self) -> None:
        """The last section has ended. Raises Terminated where SIGTERM waits."""
        if self.waits and not self.sections:
            self._stop_waiting()
            raise Terminated

    @contextmanager
    def section(self) -> Iterator[None]:
        """A critical section. Raises Terminated at its end if SIGTERM arrived."""
        self.sections += 1
        try:
            yield
        finally:
            self.sections -= 1
            self.end_section()

    def finish(self, steps: Callable[[], None]) -> None:
        """After ``Terminated``: wait for ``steps`` under way, whose batches count as trained.

        Raises Terminated when that takes too long, or SIGTERM comes again.
        """
        if self._installed:
            self._wait()
        try:
            steps()
        except PsError as error:
            log.warning("step.cut", "this worker leaves without the end of its last step: %s", error)
        finally:
            self._stop_waiting()

    def _wait(self) -> None:
        self.waits = True
        self._timer = threading.Timer(self._patience_seconds, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def _stop_waiting(self) -> None:
        self.waits = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        if self.waits:
            self._expires = True
            os.kill(self._pid, signal.SIGTERM)


def leave_reason(error: BaseException | None) -> str:
    """The reason why a worker leaves; empty at a clean end."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return ""
    return f"{type(error).__name__}: {error}".removesuffix(": ")[:_REASON_CHARACTERS]


def warn_of_no_step(rank: int, call: str) -> None:
    """Warn that a worker leaves without having trained: its script never called ``call``."""
    log.warning(
        "step.cut",
        "worker %d leaves without a step: the script never called %s, and its parameters are as they were",
        rank,
        call,
    )
