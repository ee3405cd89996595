"""A tracer that writes trace files; no collector is needed."""

from __future__ import annotations

import logging
import os
import random
import secrets
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

from ps_protocol.errors import ConfigError
from ps_protocol.tracing.clock import read_clock
from ps_protocol.tracing.context import TraceContext, parse_traceparent
from ps_protocol.tracing.trace_events import CLOCK, complete, context_of, flow, metadata
from ps_protocol.tracing.tracer import Attributes

logger = logging.getLogger(__name__)

FLUSH_NS = 1_000_000_000
BUFFER_BYTES = 1 << 16

_FULL = "the trace file is full: later steps are not in it"


def open_folder(folder: Path) -> None:
    """Make ``folder``, for this user alone where it is new. Raises ConfigError."""
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the folder {folder} of the trace cannot be created: {error.strerror}",
            remedy="give with --trace or PS_TRACE a folder that this user may write to",
        ) from error


class FileTracer:
    """Owns one file, which grows to ``limit_bytes`` at most. A file that cannot be written ends the trace, not the job.

    Each line of the file is one event, so a file whose process was killed is readable up to its last whole line.
    """

    def __init__(self, folder: Path, process: str, limit_bytes: int) -> None:
        """``process`` names this process in the picture: "worker 0". Raises ConfigError."""
        open_folder(folder)
        #: Where the events are.
        self.path = folder / f"{process.replace(' ', '-')}-{secrets.token_hex(4)}.json"
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"the trace file {self.path} cannot be created: {error.strerror}",
                remedy="give with --trace or PS_TRACE a folder that this user may write to",
            ) from error
        self._file: BinaryIO | None = os.fdopen(descriptor, "wb", BUFFER_BYTES)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._left_bytes = limit_bytes
        self._flushed_ns = time.monotonic_ns()
        #: By track, its lines: thread numbers and where the last span of each ends.
        self._lanes: dict[str, list[tuple[int, int]]] = {}
        self._threads = 0
        name = metadata("process_name", self._pid, 0, {"name": process})
        self._write("[\n" + name + metadata(CLOCK, self._pid, 0, asdict(read_clock())))

    def begin(self, name: str, track: str, begin_ns: int, attributes: Attributes, traceparent: str = "") -> FileSpan:
        """Begin a span; it is written when it ends."""
        cause = parse_traceparent(traceparent) if traceparent else None
        trace_id = cause.trace_id if cause else random.getrandbits(128) or 1
        parent = cause.key if cause else ""
        return FileSpan(self, name, track, begin_ns, attributes, TraceContext(trace_id, _new_span_id()), parent)

    def record(self, span: FileSpan, end_ns: int, attributes: Attributes | None) -> None:
        """Write ``span`` and its parts."""
        with self._lock:
            if self._file is None:
                return
            pid, (tid, words) = self._pid, self._lane(span.track, span.begin_ns, end_ns)
            args = {**span.attributes, **attributes} if attributes else span.attributes
            context = context_of(span.context, span.parent)
            events = [words, complete(span.name, pid, tid, span.begin_ns, end_ns, args, context)]
            for name, begin, end, more, sends, receives in span.parts:
                events.append(complete(name, pid, tid, begin, end, more))
                if sends:
                    events.append(flow("s", sends, pid, tid, begin))
                if receives:
                    events.append(flow("f", receives, pid, tid, begin))
            self._write("".join(events))
            if end_ns - self._flushed_ns > FLUSH_NS:
                self._flushed_ns = end_ns
                self._flush()

    def close(self) -> None:
        """End the file, after which it is one JSON array. Safe to repeat; nothing in a forked child."""
        with self._lock:
            if self._file is not None and os.getpid() == self._pid:
                self._end()

    def _lane(self, track: str, begin_ns: int, end_ns: int) -> tuple[int, str]:
        """The thread number for a span of ``track``, with the event that names it where it is new.

        Spans of one thread number do not overlap, as the format demands.
        """
        lanes = self._lanes.setdefault(track, [])
        for place, (tid, last_end) in enumerate(lanes):
            if last_end <= begin_ns:
                lanes[place] = tid, end_ns
                return tid, ""
        self._threads += 1
        lanes.append((self._threads, end_ns))
        name = f"{track} ({len(lanes)})" if len(lanes) > 1 else track
        return self._threads, metadata("thread_name", self._pid, self._threads, {"name": name})

    def _write(self, text: str) -> None:
        """Write whole lines, unless they would make the file too long: then end it."""
        if self._file is None:
            return
        data = text.encode("ascii")
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            logger.warning("%s (%s); PS_TRACE_MB is its limit", _FULL, self.path)
            self._end()
            return
        try:
            self._file.write(data)
        except OSError as error:
            self._give_up(error)

    def _flush(self) -> None:
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def _end(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        words = _FULL if self._left_bytes < 0 else "the process has ended"
        last = metadata("process_labels", self._pid, 0, {"labels": words}).rstrip(",\n")
        try:
            file.write(f"{last}\n]\n".encode("ascii"))
            file.close()
        except OSError as error:
            self._lost(error)

    def _give_up(self, error: OSError) -> None:
        file, self._file = self._file, None
        self._lost(error)
        if file is not None:
            try:
                file.close()
            except OSError:
                pass  # said already

    def _lost(self, error: OSError) -> None:
        logger.warning("the trace ends here: %s cannot be written: %s", self.path, error.strerror)


class FileSpan:
    """A ``TraceSpan`` of a ``FileTracer``."""

    __slots__ = ("_tracer", "attributes", "begin_ns", "context", "name", "parent", "parts", "track")

    def __init__(
        self,
        tracer: FileTracer,
        name: str,
        track: str,
        begin_ns: int,
        attributes: Attributes,
        context: TraceContext,
        parent: str,
    ) -> None:
        self._tracer = tracer
        self.name = name
        self.track = track
        self.begin_ns = begin_ns
        self.attributes = attributes
        self.context = context
        #: Key of the span that caused this one; empty: none did.
        self.parent = parent
        #: Name, beginning, end, attributes, message sent, message received.
        self.parts: list[tuple[str, int, int, Attributes | None, str, str]] = []

    @property
    def traceparent(self) -> str:
        """The context of this span."""
        return self.context.traceparent

    @property
    def key(self) -> str:
        """The span's number."""
        return self.context.key

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
        self.parts.append((name, begin_ns, end_ns, attributes, sends, receives))

    def end(self, end_ns: int, attributes: Attributes | None = None) -> None:
        """Write the span."""
        self._tracer.record(self, end_ns, attributes)


def _new_span_id() -> int:
    return random.getrandbits(64) or 1
