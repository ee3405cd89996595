"""A tracer that writes trace files, from which ``merge`` makes the picture; no collector is needed.

A file has lines of JSON: first who writes and which clock it reads, then batches of spans. A step must not pay for the
verbose format of trace viewers; a process that is killed leaves whole lines. A file that is full becomes the earlier
half of the trace, in the place of the one before: the newest steps are kept.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import threading
from collections import deque
from dataclasses import asdict
from itertools import count
from pathlib import Path
from random import getrandbits
from typing import BinaryIO

from ps_protocol.errors import ConfigError
from ps_protocol.logs import EventLogger
from ps_protocol.tracing.clock import read_clock
from ps_protocol.tracing.context import TraceContext, parse_traceparent
from ps_protocol.tracing.tracer import Attributes, NotedTimes, Part, Row

logger = EventLogger(__name__)

SUFFIX, EARLIER = ".trace", ".earlier"
"""Of the file that is written, and of the one that was full before it, which has the same name otherwise."""

BATCH = 32
"""Spans are written together, as many as these, or those of a second."""

BATCH_NS = 1_000_000_000

Record = tuple[str, str, int, int, Attributes, str, str, str, list[Part], list[Row]]
"""Name, track, beginning, end, attributes, trace, span, the span that caused it, parts, rows that stand for parts."""


def open_folder(folder: Path) -> None:
    """Make ``folder``, for this user alone where it is new. Raises ConfigError."""
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(f"the folder {folder} of the trace", error) from error


class FileTracer:
    """Owns one file, of ``limit_bytes`` at most. A file that cannot be written ends the trace, not the job."""

    def __init__(self, folder: Path, process: str, limit_bytes: int) -> None:
        """``process`` names this process in the picture: "worker 0". Raises ConfigError."""
        open_folder(folder)
        #: Where the spans are.
        self.path = folder / f"{process.replace(' ', '-')}-{secrets.token_hex(4)}{SUFFIX}"
        self._head = _line({"process": process, "clock": asdict(read_clock())})
        self._half_bytes = limit_bytes // 2
        #: The oldest steps are not kept any more.
        self._drops = False
        self._lock = threading.Lock()
        self._pid = os.getpid()
        try:
            self._file: BinaryIO | None = self._begin_file()
        except OSError as error:
            raise _refused(f"the trace file {self.path}", error) from error
        #: Of traces that begin here, the first half of the number; the second is that of the span.
        self.prefix = f"{getrandbits(64) or 1:016x}"
        self._numbers = count(getrandbits(62) or 1)
        #: Appended to by any thread, emptied under the lock.
        self._ended: deque[FileSpan] = deque()
        self._written_ns = 0

    def _begin_file(self) -> BinaryIO:
        """Raises OSError."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        file = os.fdopen(descriptor, "wb", 0)
        self._left_bytes = self._half_bytes - len(self._head)
        file.write(self._head)
        return file

    def begin(self, name: str, track: str, begin_ns: int, attributes: Attributes, traceparent: str = "") -> FileSpan:
        """Begin a span; it is kept when it ends."""
        return FileSpan(self, name, track, begin_ns, attributes, f"{next(self._numbers):016x}", traceparent)

    def record(self, span: FileSpan, end_ns: int) -> None:
        """Keep a span that has ended, to be written with others."""
        self._ended.append(span)
        if len(self._ended) >= BATCH or end_ns - self._written_ns > BATCH_NS:
            with self._lock:
                self._written_ns = end_ns
                self._write_batch()

    def close(self) -> None:
        """Write what is kept, and end the file. Safe to repeat; nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._write_batch()
            self._end()

    def _write_batch(self) -> None:
        batch = [self._ended.popleft().record() for _ in range(len(self._ended))]
        if batch:
            self._write(batch)

    def _write(self, batch: list[Record]) -> None:
        """Write one line, to a new file where this one would become too long."""
        if self._file is None:
            return
        data = _line(batch)
        try:
            if len(data) > self._left_bytes:
                self._file = self._turn_over(self._file)
            self._left_bytes -= len(data)
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            logger.warning("report", "the trace ends here: %s cannot be written: %s", self.path, error.strerror)
            self._end()

    def _turn_over(self, file: BinaryIO) -> BinaryIO:
        """Make ``file`` the earlier half of the trace; the previous earlier half is dropped. Raises OSError."""
        if not self._drops and self.path.with_suffix(EARLIER).exists():
            self._drops = True
            logger.warning(
                "report", "the trace file %s is full, and the oldest steps are dropped: see PS_TRACE_MB", self.path
            )
        file.close()
        os.replace(self.path, self.path.with_suffix(EARLIER))  # noqa: PTH105
        return self._begin_file()

    def _end(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


class FileSpan:
    """A ``TraceSpan`` of a ``FileTracer``. On the way of a step it notes; ``record`` does the rest."""

    __slots__ = (
        "_attributes",
        "_begin_ns",
        "_cause",
        "_end_ns",
        "_more",
        "_name",
        "_parts",
        "_sources",
        "_tracer",
        "_track",
        "key",
    )

    def __init__(
        self,
        tracer: FileTracer,
        name: str,
        track: str,
        begin_ns: int,
        attributes: Attributes,
        key: str,
        cause: str,
    ) -> None:
        """``cause``: the context that it was caused by, as it came."""
        self._tracer = tracer
        self._name = name
        self._track = track
        self._begin_ns = begin_ns
        self._end_ns = 0
        self._attributes = attributes
        self._more: Attributes | None = None
        #: The span's number.
        self.key = key
        self._cause = cause
        self._parts: list[Part] = []
        self._sources: list[NotedTimes] = []

    @property
    def traceparent(self) -> str:
        """The context of this span."""
        if not self._cause:
            return f"00-{self._tracer.prefix}{self.key}-{self.key}-01"
        return TraceContext(self._identity[0], self.key).traceparent

    @property
    def _identity(self) -> tuple[str, str]:
        """The numbers of its trace, and of the span that caused it in another process."""
        cause = parse_traceparent(self._cause) if self._cause else None
        return (cause.trace, cause.span) if cause else (f"{self._tracer.prefix}{self.key}", "")

    def part(
        self,
        name: str,
        begin_ns: int,
        end_ns: int,
        attributes: Attributes | None = None,
        *,
        sends: str = "",
        receives: str = "",
    ) -> None:
        """Keep a part until the span ends."""
        self._parts.append((name, begin_ns, end_ns, attributes, sends, receives))

    def later(self, source: NotedTimes) -> None:
        """Ask ``source`` for its row when the span is written."""
        self._sources.append(source)

    def end(self, end_ns: int, attributes: Attributes | None = None) -> None:
        """Keep the span."""
        self._end_ns, self._more = end_ns, attributes
        self._tracer.record(self, end_ns)

    def record(self) -> Record:
        """The span as it is written, once it has ended."""
        said = {**self._attributes, **self._more} if self._more else self._attributes
        trace, cause = self._identity
        rows = [source.row() for source in self._sources]
        return self._name, self._track, self._begin_ns, self._end_ns, said, trace, self.key, cause, self._parts, rows


def _line(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n"


def _refused(what: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{what} cannot be created: {error.strerror}",
        remedy="give with --trace or PS_TRACE a folder that this user may write to",
    )
