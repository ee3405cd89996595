"""What a trace says of one push on a shard: received, applied, waited for by the mode, answered."""

from __future__ import annotations

from time import monotonic_ns

from ps_protocol.tracing.context import key_of
from ps_protocol.tracing.tracer import Attributes, Tracer
from ps_server.consistency import WorkerKey


class ServedPush:
    """Belongs to one traced push; used on the event loop, ``logged`` and ``applied`` in the executor."""

    __slots__ = ("_apply", "_cause", "_ended", "_may_go_ns", "_reason", "_sending_ns", "_span", "_waiting_ns")

    def __init__(
        self, tracer: Tracer, traceparent: str, worker: WorkerKey, model: str, shard: int, begin_ns: int
    ) -> None:
        """The push has been received whole; its header came at ``begin_ns``."""
        now = monotonic_ns()
        track = f"worker {worker.rank}, model {model}"
        said: Attributes = {"model": model, "rank": worker.rank, "shard": shard}
        self._span = tracer.begin("push", track, begin_ns, said, traceparent)
        self._cause = f"{key_of(traceparent)}.{shard}"
        self._span.part("receive", begin_ns, now, receives=self._cause)
        self._waiting_ns = self._may_go_ns = self._sending_ns = 0
        self._reason = ""
        #: Beginning and end of the update that the push was applied in; zeros: it was not.
        self._apply = 0, 0
        self._ended = False

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
        if not self._ended:
            self._span.part("log", begin_ns, end_ns)

    def applied(self, begin_ns: int, end_ns: int) -> None:
        """An update with this push was made, and logged within this time."""
        if not self._ended:
            self._apply = begin_ns, end_ns
            self._span.part("apply", begin_ns, end_ns)

    def end(self, outcome: str) -> None:
        """The push is answered, or never will be."""
        now = monotonic_ns()
        self._ended = True
        if self._reason:
            begin, end = cut((self._waiting_ns, self._may_go_ns), self._apply)
            self._span.part("wait", begin, end, {"reason": self._reason})
        if self._sending_ns:
            self._span.part("send", self._sending_ns, now, sends=f"{self._cause}.answer")
        self._span.end(now, {"outcome": outcome})


def cut(wait: tuple[int, int], apply: tuple[int, int]) -> tuple[int, int]:
    """``wait`` without what it shares with ``apply``, unless one of the two is inside the other: parts of a span nest.

    The update is made beside the event loop: in sync it begins when the last push of a step ends the wait of all, and
    in ssp a worker waits for others while its own push is applied.
    """
    if wait[0] < apply[0] < wait[1] < apply[1]:
        return wait[0], apply[0]
    if apply[0] < wait[0] < apply[1] < wait[1]:
        return apply[1], wait[1]
    return wait
