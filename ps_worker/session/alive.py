"""Touches a file every few seconds, so that a liveness probe sees that the threads of this process run."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

from ps_protocol.errors import ConfigError
from ps_protocol.logs import EventLogger
from ps_worker import times

log = EventLogger("ps_worker")


class AliveFile:
    """Made by the user's thread when it has joined. A daemon thread touches the file until ``stop`` or ``remove``.

    A step may take any time, unless it keeps the interpreter lock. After a worker has lost its place its file stays and
    is no longer touched: the probe ends a worker that hangs, any other ends by itself.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError where the file cannot be written."""
        self._path = path
        self._stopped = threading.Event()
        try:
            path.touch()
        except OSError as error:
            raise ConfigError(
                "the file for liveness probes cannot be written",
                actual=str(error),
                remedy="correct PS_ALIVE_FILE, or leave it out",
            ) from error
        self._thread = threading.Thread(target=self._touch, name="ps-alive", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop touching the file, so that it grows old."""
        self._stopped.set()

    def remove(self) -> None:
        """Remove the file: the probe then leaves this process alone. Safe to repeat."""
        self._stopped.set()
        self._thread.join()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _touch(self) -> None:
        failed = False
        while not self._stopped.wait(times.TOUCH_SECONDS):
            try:
                self._path.touch()
                failed = False
            except OSError as error:
                if not failed:
                    log.warning("alive.failed", "the file for liveness probes cannot be written: %s", error)
                failed = True
