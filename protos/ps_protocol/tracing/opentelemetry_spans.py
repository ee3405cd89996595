"""A tracer that hands its spans to the OpenTelemetry SDK of the process. The only module that imports it."""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, TraceFlags
from opentelemetry.util.types import AttributeValue

from ps_protocol.logs import EventLogger
from ps_protocol.tracing.clock import read_clock
from ps_protocol.tracing.context import TraceContext, parse_traceparent
from ps_protocol.tracing.rows import parts_of
from ps_protocol.tracing.tracer import Attributes, NotedTimes

logger = EventLogger(__name__)

PREFIX = "torch_ps."
"""Of the names of attributes."""


class OpenTelemetryTracer:
    """Spans of the process's tracer provider. Times are those of the wall clock, as its interface asks for."""

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        """``provider``; None: the one that is set for the process."""
        self._tracer = trace.get_tracer("torch_ps", tracer_provider=provider)
        self._offset_ns = read_clock().wall_offset_ns
        self._warned = False

    def begin(
        self, name: str, track: str, begin_ns: int, attributes: Attributes, traceparent: str = ""
    ) -> OpenTelemetrySpan:
        """Begin a span: a child of the span of ``traceparent``, else of the one that is current here."""
        cause = parse_traceparent(traceparent) if traceparent else None
        within = None
        if cause:
            flags = TraceFlags(TraceFlags.SAMPLED if cause.sampled else TraceFlags.DEFAULT)
            remote = SpanContext(int(cause.trace, 16), int(cause.span, 16), is_remote=True, trace_flags=flags)
            within = trace.set_span_in_context(NonRecordingSpan(remote))
        named = _named({**attributes, "track": track})
        span = self._tracer.start_span(name, within, attributes=named, start_time=begin_ns + self._offset_ns)
        if not self._warned and not span.get_span_context().is_valid:
            self._warned = True
            logger.warning(
                "report",
                "spans go nowhere: this process has no OpenTelemetry SDK; set one up before the first step, or start "
                "the program with opentelemetry-instrument",
            )
        return OpenTelemetrySpan(self._tracer, span, self._offset_ns)

    def close(self) -> None:
        """Nothing: the SDK belongs to the process."""


class OpenTelemetrySpan:
    """A ``TraceSpan`` of an ``OpenTelemetryTracer``; its parts are child spans."""

    __slots__ = ("_context", "_is_valid", "_offset_ns", "_sources", "_span", "_tracer", "_within")

    def __init__(self, tracer: trace.Tracer, span: Span, offset_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._within = trace.set_span_in_context(span)
        self._offset_ns = offset_ns
        self._sources: list[NotedTimes] = []
        found = span.get_span_context()
        self._is_valid = found.is_valid
        self._context = TraceContext(f"{found.trace_id:032x}", f"{found.span_id:016x}", found.trace_flags.sampled)

    @property
    def traceparent(self) -> str:
        """The context of this span; empty where there is no SDK."""
        return self._context.traceparent if self._is_valid else ""

    @property
    def key(self) -> str:
        """The span's number."""
        return self._context.span

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
        """Record a child span. Messages are not shown: the context goes with them."""
        offset = self._offset_ns
        child = self._tracer.start_span(
            name, self._within, attributes=_named(attributes or {}), start_time=begin_ns + offset
        )
        child.end(end_ns + offset)

    def later(self, source: NotedTimes) -> None:
        """Record what ``source`` stands for at the end."""
        self._sources.append(source)

    def end(self, end_ns: int, attributes: Attributes | None = None) -> None:
        """End the span."""
        for source in self._sources:
            for name, begin, end, said, _, _ in parts_of(source.row(), self.key, ""):
                self.part(name, begin, end, said)
        if attributes:
            self._span.set_attributes(_named(attributes))
        self._span.end(end_ns + self._offset_ns)


def _named(attributes: Attributes) -> dict[str, AttributeValue]:
    return {PREFIX + name: value for name, value in attributes.items()}
