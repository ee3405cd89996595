"""The trace of one push to one shard: encoded, sent, waited for, received."""

from __future__ import annotations

from time import monotonic_ns

from ps_protocol.cluster.answers import Answer, StepAnswer
from ps_protocol.tracing.rows import SENT
from ps_protocol.tracing.tracer import Row, TraceSpan


class PushTrace:
    """Used by one ShardStream, for a push that is traced. It notes times; ``rows`` makes parts of them."""

    __slots__ = (
        "_arrived_ns",
        "_begin_ns",
        "_bytes",
        "_encoded_ns",
        "_heard",
        "_sent_ns",
        "_shard",
        "_waiting_ns",
    )

    def __init__(self, span: TraceSpan, shard: int) -> None:
        """``span`` is the step's. The push is begun now."""
        self._shard = shard
        self._begin_ns = monotonic_ns()
        self._encoded_ns = self._sent_ns = self._bytes = self._waiting_ns = self._arrived_ns = 0
        #: Since when something was waited for, its arrival, when it was in place; why; bytes; whether it is a step's.
        self._heard: list[tuple[int, int, int, str, int, bool]] = []
        span.later(self)

    def encoded(self) -> None:
        """The gradients are in the wire format."""
        self._encoded_ns = monotonic_ns()

    def sent(self, nbytes: int) -> None:
        """The push has been handed to the transport; ``nbytes`` of payload."""
        self._sent_ns, self._bytes = monotonic_ns(), nbytes

    def waits(self) -> None:
        """The worker waits for an answer of the shard."""
        self._waiting_ns, self._arrived_ns = monotonic_ns(), 0

    def arrives(self) -> None:
        """The answer has come, its payload follows."""
        self._arrived_ns = monotonic_ns()

    def received(self, answer: Answer | None) -> None:
        """``answer`` is in place; None: the shard goes on waiting."""
        now, nbytes = monotonic_ns(), -1 if answer is None else answer.payload_bytes
        reason, is_step = (answer.waited_for, True) if isinstance(answer, StepAnswer) else ("", False)
        self._heard.append((self._waiting_ns, self._arrived_ns, now, reason, nbytes, is_step))

    def row(self) -> Row:
        """What was noted."""
        return SENT, self._shard, self._begin_ns, self._encoded_ns, self._sent_ns, self._bytes, self._heard
