"""The trace of one push on a shard: received, applied, waited for by the mode, answered."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns

from ps_protocol.tracing.rows import SERVED
from ps_protocol.tracing.tracer import Attributes, Row, Tracer, TraceSpan
from ps_server.consistency import WorkerKey


class PushTracing:
    """Used by one step stream: begins the span of each push that its worker traces."""

    def __init__(self, tracer: Tracer, worker: WorkerKey, model: str, shard: int) -> None:
        self._tracer = tracer
        self._shard = shard
        self._track = f"worker {worker.rank}, model {model}"
        self._said: Attributes = {"model": model, "rank": worker.rank, "shard": shard}
        self._unanswered: set[ServedPush] = set()

    def begin(self, traceparent: str, begin_ns: int) -> ServedPush:
        """The push of ``traceparent`` has been received whole; its header came at ``begin_ns``."""
        span = self._tracer.begin("push", self._track, begin_ns, self._said, traceparent)
        push = ServedPush(span, self._shard, begin_ns, self._unanswered.discard)
        self._unanswered.add(push)
        return push

    def close(self) -> None:
        """The stream has ended: what is not answered never will be."""
        for push in list(self._unanswered):
            push.end("not answered: the stream ended")


class ServedPush:
    """Belongs to one traced push; used on the event loop, ``logged`` and ``applied`` in the executor.

    It notes times; ``rows`` makes parts of them.
    """

    __slots__ = (
        "_apply",
        "_begin_ns",
        "_ended",
        "_ended_ns",
        "_log",
        "_may_go_ns",
        "_reason",
        "_received_ns",
        "_replicated",
        "_sending_ns",
        "_shard",
        "_span",
        "_waiting_ns",
    )

    def __init__(self, span: TraceSpan, shard: int, begin_ns: int, ended: Callable[[ServedPush], None]) -> None:
        """``ended`` is called at its end."""
        self._ended = ended
        #: None: it has ended.
        self._span: TraceSpan | None = span
        self._shard = shard
        self._begin_ns = begin_ns
        self._received_ns = monotonic_ns()
        self._waiting_ns = self._may_go_ns = self._sending_ns = self._ended_ns = 0
        self._reason = ""
        #: Beginnings and ends: of the update that the push was applied in, of its record, of the wait for a standby.
        #: Zeros: there was none.
        self._apply = self._log = self._replicated = 0, 0

    def has_turn(self) -> None:
        """Its answer is the next, and waits for the consistency mode from here on."""
        self._waiting_ns = monotonic_ns()

    def may_go(self, reason: str) -> None:
        """The consistency mode lets the answer go; it waited for ``reason``, or for nothing."""
        self._may_go_ns, self._reason = monotonic_ns(), reason

    def sends(self) -> None:
        """The parameters that the answer brings are there, and are sent."""
        self._sending_ns = monotonic_ns()

    def logged(self, begin_ns: int, end_ns: int) -> None:
        """The log has an update with this push. Nothing for a push that was answered before."""
        if self._span is not None:
            self._log = begin_ns, end_ns

    def applied(self, begin_ns: int, end_ns: int) -> None:
        """An update with this push was made, and logged within this time."""
        if self._span is not None:
            self._apply = begin_ns, end_ns

    def replicated(self, begin_ns: int, end_ns: int) -> None:
        """The answer waited within this time until the standby had the update."""
        self._replicated = begin_ns, end_ns

    def end(self, outcome: str) -> None:
        """The push is answered, or never will be."""
        span, self._span = self._span, None
        self._ended(self)
        self._ended_ns = now = monotonic_ns()
        if span is not None:
            span.later(self)
            span.end(now, {"outcome": outcome})

    def row(self) -> Row:
        """What was noted."""
        return (
            *(SERVED, self._shard, self._begin_ns, self._received_ns, *self._log, *self._apply, *self._replicated),
            *(self._waiting_ns, self._may_go_ns, self._sending_ns, self._ended_ns, self._reason),
        )
