"""What a trace says of one push to one shard: encoded, sent, waited for, received."""

from __future__ import annotations

from time import monotonic_ns

from ps_protocol.cluster.answers import Answer, StepAnswer
from ps_protocol.tracing.tracer import TraceSpan


class PushTrace:
    """Used by one ShardStream, for a push that is traced."""

    __slots__ = ("_arrived_ns", "_begin_ns", "_encoded_ns", "_shard", "_span", "_waiting_ns")

    def __init__(self, span: TraceSpan, shard: int) -> None:
        """``span`` is the step's. The push is begun now."""
        self._span = span
        self._shard = shard
        self._begin_ns = monotonic_ns()
        self._encoded_ns = 0
        self._waiting_ns = 0
        self._arrived_ns = 0

    @property
    def traceparent(self) -> str:
        """The context that goes with the push."""
        return self._span.traceparent

    def encoded(self) -> None:
        """The gradients are in the wire format."""
        self._encoded_ns = monotonic_ns()

    def sent(self, nbytes: int) -> None:
        """The push has been handed to the transport; ``nbytes`` of payload."""
        now, span = monotonic_ns(), self._span
        if self._encoded_ns:
            span.part("encode", self._begin_ns, self._encoded_ns, {"shard": self._shard})
        begin = self._encoded_ns or self._begin_ns
        span.part("send", begin, now, {"shard": self._shard, "bytes": nbytes}, sends=f"{span.key}.{self._shard}")

    def waits(self) -> None:
        """The worker waits for an answer of the shard."""
        self._waiting_ns, self._arrived_ns = monotonic_ns(), 0

    def arrives(self) -> None:
        """The answer has come, its payload follows."""
        self._arrived_ns = monotonic_ns()

    def received(self, answer: Answer | None) -> None:
        """``answer`` is in place; None: the shard goes on waiting."""
        now, span = monotonic_ns(), self._span
        arrived = self._arrived_ns or now
        waited: dict[str, str | int] = {"shard": self._shard}
        if isinstance(answer, StepAnswer) and answer.waited_for:
            waited["reason"] = answer.waited_for
        span.part("wait", self._waiting_ns, arrived, waited)
        if answer is not None:
            key = f"{span.key}.{self._shard}.answer" if isinstance(answer, StepAnswer) else ""
            said = {"shard": self._shard, "bytes": answer.payload_bytes}
            span.part("receive", arrived, now, said, receives=key)
