"""Chooses the tracer of a process from its environment: PS_TRACE, PS_TRACE_MB."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ps_protocol.errors import ConfigError
from ps_protocol.text import whole_number
from ps_protocol.tracing.trace_file import FileTracer
from ps_protocol.tracing.tracer import Tracer

VARIABLE = "PS_TRACE"
"""A folder for trace files, or ``OPENTELEMETRY``; not set: no trace."""

LIMIT_VARIABLE = "PS_TRACE_MB"
OPENTELEMETRY = "otel"
LIMIT_MB = 64


def make_tracer(environ: Mapping[str, str], process: str) -> Tracer | None:
    """The tracer of ``process``, such as "worker 0"; None: tracing is off. Raises ConfigError."""
    target = environ.get(VARIABLE, "")
    if not target:
        return None
    if target == OPENTELEMETRY:
        return _opentelemetry()
    return FileTracer(Path(target), process, limit_bytes(environ))


def limit_bytes(environ: Mapping[str, str]) -> int:
    """The limit of one trace file. Raises ConfigError."""
    text = environ.get(LIMIT_VARIABLE) or str(LIMIT_MB)
    if not (limit := whole_number(text)):
        raise ConfigError(
            f"{LIMIT_VARIABLE} is not a whole number from 1",
            actual=repr(text),
            remedy=f"correct {LIMIT_VARIABLE}, or leave it out for {LIMIT_MB}",
        )
    return limit << 20


def _opentelemetry() -> Tracer:
    try:
        from ps_protocol.tracing.opentelemetry_spans import OpenTelemetryTracer
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ps_"):
            raise
        raise ConfigError(
            f"{VARIABLE}={OPENTELEMETRY} needs the OpenTelemetry API, which is not installed",
            remedy="pip install 'torch-ps[trace]' and an OpenTelemetry SDK",
        ) from error
    return OpenTelemetryTracer()
