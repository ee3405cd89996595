"""Limits log records that a client can cause by the thousands."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ps_protocol.logs import event_of

BURST = 10
"""Records of one kind that are written within one period."""


_MOST_KINDS = 1000


class LogLimit(logging.Filter):
    """A filter for a logger whose records clients can cause. Any thread may log.

    Of each kind of record (its level, the text before its arguments are filled in, the type of its exception)
    ``burst`` are written in ``period_seconds``. The first one after that period has the number of omitted ones.
    """

    def __init__(
        self,
        burst: int = BURST,
        period_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._burst = burst
        self._period_seconds = period_seconds
        self._clock = clock
        #: Per kind: the begin of its period, and the number of records since.
        self._periods: dict[tuple[object, ...], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether ``record`` is written; the next written one has the number of omitted ones."""
        failure = record.exc_info[0] if record.exc_info else None
        kind, now = (record.levelno, record.msg, failure), self._clock()
        begin, seen = self._periods.get(kind, (now, 0))
        left_out = 0
        if now - begin >= self._period_seconds:
            left_out, begin, seen = max(0, seen - self._burst), now, 0
        if kind not in self._periods and len(self._periods) >= _MOST_KINDS:
            self._periods.clear()
        self._periods[kind] = begin, seen + 1
        if seen >= self._burst:
            return False
        # Its text changes below; its event does not.
        record.event = event_of(record)
        if left_out:
            record.msg = f"{record.msg} (and {left_out} more like this before)"
        elif seen + 1 == self._burst:
            record.msg = f"{record.msg} (more like this are left out for up to {self._period_seconds:g} s)"
        return True
