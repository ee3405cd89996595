"""Decides when a piece of work has been in the executor for too long, and ends the process then.

A shard that is lost is started again, or its standby takes its place; one that is stuck keeps its lease, and all
workers wait for it.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable

from ps_protocol.logs import EventLogger
from ps_protocol.times import SLOWEST_BYTES_PER_SECOND
from ps_server.shard import times

logger = EventLogger(__name__)

EXIT_STUCK = 70
"""The exit code of a shard that ended itself because a piece of work did not end."""


def end_process(report: str, log_seconds: float = 5.0) -> None:
    """Log why, and end: nothing is saved and nothing is waited for, because anything may hang."""
    # The reader of the log may hang, too.
    saying = threading.Thread(target=logger.error, args=("server.stuck", "%s", report), daemon=True)
    saying.start()
    saying.join(log_seconds)
    os._exit(EXIT_STUCK)


class Watchdog:
    """Set by its ShardExecutor for each piece of work; looks once a second from a thread of its own.

    It counts looks and reads no clock: a process that was frozen or a machine that slept is not stuck, and one that is
    busy is given more time. ``end`` is called once, in that thread, with what it was and the stack of its thread.
    """

    def __init__(self, seconds: float = times.STUCK_SECONDS, end: Callable[[str], None] = end_process) -> None:
        self._seconds = seconds
        self._end = end
        #: Bytes of the work under way, and its thread; set by the ShardExecutor. A new tuple each time: it names the
        #: piece.
        self.work: tuple[int, int] | None = None
        self._seen: tuple[int, int] | None = None
        self._looks = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def look(self) -> bool:
        """Check once. Returns whether the work seen before is stuck; if so, calls ``end``."""
        work = self.work
        if work is None or work is not self._seen:
            self._seen, self._looks = work, 0
            return False
        self._looks += 1
        nbytes, thread = work
        limit_seconds = self._seconds + nbytes / SLOWEST_BYTES_PER_SECOND
        if self._looks * times.WATCH_SECONDS <= limit_seconds:
            return False
        self._end(
            f"a piece of work on {nbytes} bytes has not ended in {limit_seconds:.0f} s; this process ends with code "
            f"{EXIT_STUCK}, so that a restart or a standby takes its place. It is in:\n{_stack(thread)}"
        )
        return True

    def close(self) -> None:
        """Stop looking."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(times.WATCH_SECONDS):
            if self.look():
                return


def _stack(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)) if frame else "(the thread has ended)\n"
