"""A tracer that writes trace files, from which ``merge`` makes the picture; no collector is needed.

A file has lines of JSON: first who writes and which clock it reads, then batches of spans. A step must not pay for the
verbose format of trace viewers; a process that is killed leaves whole lines.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import threading
from dataclasses import asdict
from pathlib import Path
from random import getrandbits
from typing import BinaryIO

from ps_protocol.errors import ConfigError
from ps_protocol.tracing.clock import read_clock
from ps_protocol.tracing.context import TraceContext, parse_traceparent
from ps_protocol.tracing.tracer import Attributes

logger = logging.getLogger(__name__)

SUFFIX = ".trace"

BATCH = 64
"""Spans are written together, as many as these, or those of a second."""

BATCH_NS = 1_000_000_000

Part = tuple[str, int, int, Attributes | None, str, str]
"""Name, beginning, end, attributes, message sent, message received."""

Record = tuple[str, str, int, int, Attributes, str, str, str, list[Part]]
"""Name, track, beginning, end, attributes, trace, span, the span that caused it, parts."""


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
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _refused(f"the trace file {self.path}", error) from error
        self._file: BinaryIO | None = os.fdopen(descriptor, "wb", 0)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._left_bytes = limit_bytes
        self._batch: list[Record] = []
        self._written_ns = 0
        self._write({"process": process, "clock": asdict(read_clock())})

    def begin(self, name: str, track: str, begin_ns: int, attributes: Attributes, traceparent: str = "") -> FileSpan:
        """Begin a span; it is kept when it ends."""
        cause = parse_traceparent(traceparent) if traceparent else None
        own = f"{getrandbits(64) or 1:016x}"
        if cause is None:
            return FileSpan(self, name, track, begin_ns, attributes, f"{getrandbits(128) or 1:032x}", own, "")
        return FileSpan(self, name, track, begin_ns, attributes, cause.trace, own, cause.span)

    def record(self, record: Record) -> None:
        """Keep a span that has ended, to be written with others."""
        end_ns = record[3]
        with self._lock:
            self._batch.append(record)
            if len(self._batch) >= BATCH or end_ns - self._written_ns > BATCH_NS:
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
        batch, self._batch = self._batch, []
        if batch:
            self._write(batch)

    def _write(self, line: object) -> None:
        """Write one line, unless it would make the file too long: then end it."""
        if self._file is None:
            return
        data = json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n"
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            logger.warning("the trace file %s is full, and later steps are not in it: see PS_TRACE_MB", self.path)
            self._end()
            return
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            logger.warning("the trace ends here: %s cannot be written: %s", self.path, error.strerror)
            self._end()

    def _end(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


class FileSpan:
    """A ``TraceSpan`` of a ``FileTracer``."""

    __slots__ = ("_attributes", "_begin_ns", "_cause", "_name", "_parts", "_trace", "_tracer", "_track", "key")

    def __init__(
        self,
        tracer: FileTracer,
        name: str,
        track: str,
        begin_ns: int,
        attributes: Attributes,
        trace: str,
        key: str,
        cause: str,
    ) -> None:
        self._tracer = tracer
        self._name = name
        self._track = track
        self._begin_ns = begin_ns
        self._attributes = attributes
        self._trace = trace
        #: The span's number.
        self.key = key
        self._cause = cause
        self._parts: list[Part] = []

    @property
    def traceparent(self) -> str:
        """The context of this span."""
        return TraceContext(self._trace, self.key).traceparent

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

    def end(self, end_ns: int, attributes: Attributes | None = None) -> None:
        """Keep the span."""
        said = {**self._attributes, **attributes} if attributes else self._attributes
        record = self._name, self._track, self._begin_ns, end_ns, said, self._trace, self.key, self._cause, self._parts
        self._tracer.record(record)


def _refused(what: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{what} cannot be created: {error.strerror}",
        remedy="give with --trace or PS_TRACE a folder that this user may write to",
    )
