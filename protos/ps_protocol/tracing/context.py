"""W3C trace context: the text by which a span names itself to other processes."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_NO_TRACE, _NO_SPAN = 32 * "0", 16 * "0"


@dataclass(slots=True)
class TraceContext:
    """The numbers of a trace and of one of its spans, as 32 and 16 hexadecimal digits."""

    trace: str
    span: str
    #: Whether its recorder keeps the trace.
    sampled: bool = True

    @property
    def traceparent(self) -> str:
        """As in the header of this name."""
        return f"00-{self.trace}-{self.span}-{'01' if self.sampled else '00'}"


def parse_traceparent(text: str) -> TraceContext | None:
    """What ``text`` names; None for a text that does not follow version 00 of the W3C recommendation."""
    found = _FORM.fullmatch(text)
    if found is None or found[1] == _NO_TRACE or found[2] == _NO_SPAN:
        return None
    return TraceContext(found[1], found[2], bool(int(found[3], 16) & 1))
