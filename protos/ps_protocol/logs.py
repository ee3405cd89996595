"""Log records: each names its event, and is written as text or JSON, on one line of printable characters.

Programs call ``configure_logging`` once, and ``describe_process`` when they know more about themselves. Modules log
through an ``EventLogger``.
"""

from __future__ import annotations

import enum
import json
import logging
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, TextIO, get_args

from ps_protocol.errors import PsError
from ps_protocol.text import printable

LEVELS = ("debug", "info", "warning", "error")
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"

#: What every JSON record has; null where it does not apply or is not known yet.
FACTS = ("role", "shard", "worker", "incarnation", "job")

LogEvent = Literal[
    "cluster.change",
    "cluster.loss",
    "divergence",
    "elasticity",
    "barrier.released",
    "uncaught",
    "job",
    "status",
    "trace",
    "metrics",
    "output",
    "psctl.note",
    "server.started",
    "server.stopping",
    "server.insecure",
    "server.stood_still",
    "server.stuck",
    "standby",
    "standby.failed",
    "recovery",
    "recovery.cut",
    "recovery.lost",
    "journal.failed",
    "history",
    "snapshot",
    "snapshot.failed",
    "checkpoint",
    "checkpoint.failed",
    "weights",
    "weights.failed",
    "relay",
    "relay.waits",
    "relay.begins",
    "mode.waits",
    "move",
    "move.failed",
    "model.placed",
    "model.released",
    "model.waits",
    "model.stopped",
    "model.options",
    "model.momentum",
    "step.skipped",
    "step.cut",
    "leases",
    "data.skipped",
    "transport",
    "caller.refused",
    "request.failed",
    "files.read",
    "files.refused",
    "files.expire",
    "coordinator.silent",
    "waiting",
    "alive.failed",
    "table.waits",
    "table.disk",
    "versions",
    "compiling",
    "report",
    "ray.restart",
    "ray.hanging",
    "ray.scaled",
]
"""What a record is about, for programs that act on records or count them. docs/monitoring.md explains each."""

OTHER, DEBUG, ERROR = "other", "debug", "error"
"""Of records of other libraries; of messages of level debug; of an exception that is no PsError."""

EVENTS = frozenset({*get_args(LogEvent), OTHER, DEBUG, ERROR})

_process: dict[str, str | int | None] = dict.fromkeys(FACTS)


class EventLogger:
    """The logger ``name`` of the standard library, with an event for every record above debug. Any thread may log.

    ``logger.warning("move.failed", "slices could not be moved yet: %s", error)``
    """

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, text: str, *args: object) -> None:
        """Log a detail."""
        self._logger.debug(text, *args, stacklevel=2)

    def info(self, event: LogEvent, text: str, *args: object) -> None:
        """Log what happens."""
        self._write(logging.INFO, event, text, args)

    def warning(self, event: LogEvent, text: str, *args: object) -> None:
        """Log what a user should look at."""
        self._write(logging.WARNING, event, text, args)

    def error(self, event: LogEvent, text: str, *args: object, exc_info: BaseException | None = None) -> None:
        """Log a failure, with the traceback of ``exc_info``."""
        self._write(logging.ERROR, event, text, args, exc_info)

    def exception(self, event: LogEvent, text: str, *args: object) -> None:
        """Log a failure with the traceback of the exception being handled."""
        self._write(logging.ERROR, event, text, args, sys.exception())

    def log(self, level: int, event: LogEvent, text: str, *args: object) -> None:
        """Log at ``level``."""
        self._write(level, event, text, args)

    def failure(self, error: PsError, level: int = logging.ERROR) -> None:
        """Log ``error``. Its class is the event."""
        self._logger.log(level, "%s", error, stacklevel=2)

    def _write(
        self, level: int, event: LogEvent, text: str, args: tuple[object, ...], trace: BaseException | None = None
    ) -> None:
        self._logger.log(level, text, *args, exc_info=trace, extra={"event": event}, stacklevel=3)


def event_of(record: logging.LogRecord) -> str:
    """The event of ``record``: one of EVENTS, or the class of a PsError."""
    named = getattr(record, "event", None)
    if named is not None:
        return str(named) if named in EVENTS else OTHER
    if record.msg == "%s" and isinstance(record.args, tuple) and isinstance(record.args[0], Exception):
        error = record.args[0]
        return type(error).__name__ if isinstance(error, PsError) else ERROR
    return DEBUG if record.levelno <= logging.DEBUG else OTHER


class LogFormat(enum.Enum):
    """How records are written."""

    TEXT = "text"
    JSON = "json"


def describe_process(**facts: str | int | None) -> None:
    """Set the fields that JSON records have of this process: role, shard, worker, incarnation, job."""
    if unknown := facts.keys() - set(FACTS):
        raise TypeError(f"no fields of log records: {', '.join(sorted(unknown))}")
    _process.update(facts)


def configure_logging(
    level: str, form: LogFormat = LogFormat.TEXT, loggers: Sequence[str] = (), stream: TextIO | None = None
) -> None:
    """Write the records from ``level`` on, one line each, to ``stream``: stderr where it is None.

    ``loggers``: only those below these names, which then reach no other handler; none: all of this process. A second
    call replaces the first.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else LineFormatter(TEXT_FORMAT))
    if form is LogFormat.JSON:
        sys.excepthook = _log_uncaught
    if not loggers:
        logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in loggers:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False


class LineFormatter(logging.Formatter):
    """Formats a record as one line, whatever its text contains; a traceback follows, indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The line, with control characters made visible."""
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """The traceback, line by line."""
        return "\n".join(f"  {printable(line)}" for line in super().formatException(ei).split("\n"))


class JsonFormatter(logging.Formatter):
    """Formats a record as one line with one JSON object.

    Fields: ``time`` (UTC, RFC 3339), ``level``, those of ``FACTS``, ``event``, ``message``, ``logger``; ``exception``
    has the lines of a traceback. ``event`` is one of ``EVENTS`` or the class of a PsError.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields: dict[str, Any] = {
            "time": time_text(record.created),
            "level": record.levelname.lower(),
            **_process,
            "event": event_of(record),
            "message": record.getMessage(),
            "logger": record.name,
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info).split("\n")
        return json_line(fields)


def json_line(fields: dict[str, Any]) -> str:
    """One JSON object as one line. Its texts have no character that is not printed as itself."""
    return json.dumps({name: _safe(value) for name, value in fields.items()}, ensure_ascii=False)


def time_text(seconds: float) -> str:
    """``seconds`` since 1970 in UTC, with milliseconds: 2026-11-22T15:04:05.678Z."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def logs_json() -> bool:
    """Whether the records of this process are JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.root.handlers)


def _safe(value: Any) -> Any:
    if isinstance(value, list):
        return [_safe(each) for each in value]
    return printable(value) if isinstance(value, str) else value


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An exception that ends the process is a record, too."""
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    # The logger of the SDK has a handler in training scripts, where the root may have none.
    logger = logging.getLogger("ps_worker")
    logger.critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace), extra={"event": "uncaught"})
