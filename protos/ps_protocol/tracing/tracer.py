"""The interface of tracers: what a step records, whatever becomes of it. Where tracing is off there is no tracer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Attributes = Mapping[str, str | int]
"""What is known of a span, by name."""


Part = tuple[str, int, int, Attributes | None, str, str]
"""Name, beginning, end, attributes, message sent, message received."""


Row = Sequence[Any]
"""Numbers and texts that stand for several parts: see ``rows``."""


class NotedTimes(Protocol):
    """Collects the times of a span, and gives them once it has ended."""

    def row(self) -> Row:
        """What was noted. Called once, from any thread; nothing is noted any more then."""
        ...


class TraceSpan(Protocol):
    """A piece of work with a beginning, parts, and an end. Times are those of ``time.monotonic_ns``."""

    @property
    def traceparent(self) -> str:
        """The W3C trace context of this span, for the process that continues the work."""
        ...

    @property
    def key(self) -> str:
        """The number of this span, which names what it sends: the other end finds it in the context."""
        ...

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
        """Record a part that has ended. From any thread, before ``end``.

        ``sends`` and ``receives`` name messages that leave at its beginning, or that its beginning is the arrival of.
        """
        ...

    def later(self, source: NotedTimes) -> None:
        """Take the row of ``source``, too, once the span has ended. ``source`` must not refer to the span by then."""
        ...

    def end(self, end_ns: int, attributes: Attributes | None = None) -> None:
        """Record the span. Called once."""
        ...


class Tracer(Protocol):
    """Used by all threads of a process."""

    def begin(self, name: str, track: str, begin_ns: int, attributes: Attributes, traceparent: str = "") -> TraceSpan:
        """Begin a span on ``track``, the name of a line in the picture.

        ``traceparent`` is the context of the span that caused it in another process; a malformed one counts as none.
        """
        ...

    def close(self) -> None:
        """Write what has been recorded. Safe to repeat."""
        ...
