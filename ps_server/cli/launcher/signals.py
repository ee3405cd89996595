"""Signals as bytes of a pipe, so that one select waits for them together with everything else."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Self

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalPipe:
    """A context of the main thread. Within it SIGINT, SIGTERM, SIGHUP and SIGCHLD make ``fd`` readable.

    A signal that was ignored before (nohup, a background job of a shell) stays ignored.
    """

    def __init__(self) -> None:
        self.fd = -1
        self._write_fd = -1
        self._old_wakeup = -1
        self._old_handlers: dict[signal.Signals, signal.Handlers | object] = {}

    def __enter__(self) -> Self:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        self._old_wakeup = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for signum in (*FORWARDED, signal.SIGCHLD):
            if signum is signal.SIGCHLD or signal.getsignal(signum) is not signal.SIG_IGN:
                self._old_handlers[signum] = signal.signal(signum, _nothing)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self.fd)
        os.close(self._write_fd)

    def read(self) -> list[signal.Signals]:
        """The received signals except SIGCHLD, in order."""
        try:
            numbers = os.read(self.fd, 4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in numbers if number in FORWARDED]


def _nothing(signum: int, frame: FrameType | None) -> None:
    """Do nothing: the byte in the pipe is enough."""
