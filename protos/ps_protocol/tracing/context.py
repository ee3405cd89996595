"""W3C trace context: the text by which a span names itself to other processes."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The numbers of a trace and of one of its spans, and whether its recorder keeps it."""

    trace_id: int
    span_id: int
    sampled: bool = True

    @property
    def traceparent(self) -> str:
        """As in the header of this name."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.sampled:02x}"

    @property
    def key(self) -> str:
        """The span's number as text."""
        return f"{self.span_id:016x}"


def parse_traceparent(text: str) -> TraceContext | None:
    """What ``text`` names; None for a text that does not follow version 00 of the W3C recommendation."""
    found = _FORM.fullmatch(text)
    if found is None:
        return None
    trace_id, span_id = int(found[1], 16), int(found[2], 16)
    if not trace_id or not span_id:
        return None
    return TraceContext(trace_id, span_id, bool(int(found[3], 16) & 1))


def key_of(traceparent: str) -> str:
    """The key of the span that wrote ``traceparent``; empty for a malformed one."""
    context = parse_traceparent(traceparent)
    return context.key if context else ""
