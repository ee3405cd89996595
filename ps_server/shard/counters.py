"""What is counted where it happens on a shard, for metrics and heartbeats."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ps_protocol.cluster.transport import Transport
from ps_protocol.cluster.view import MemberStats
from ps_protocol.metrics.histogram import Histogram


@dataclass(slots=True)
class Traffic:
    """Payload bytes over one transport."""

    received: int = 0
    sent: int = 0


@dataclass(slots=True)
class StepTimes:
    """Durations of one model's steps, in seconds. Those of the executor are written there, others on the event loop."""

    #: Of the executor: summed over pushes, how long each waited for its check, and then for its update to begin.
    queued: float = 0.0
    #: Of the executor: the same, each multiplied by the bytes of the push.
    queued_bytes: float = 0.0
    #: Of the executor: one update, the record in the log and the optimizer's step.
    apply: Histogram = field(default_factory=Histogram)
    #: From the moment that the mode lets an answer go on until it is sent.
    reply: Histogram = field(default_factory=Histogram)
    #: How long answers waited for other workers; those that did not wait are not counted.
    wait: Histogram = field(default_factory=Histogram)
    #: From the first push of a sync round to its apply.
    round: Histogram = field(default_factory=Histogram)


@dataclass(slots=True)
class Counters:
    """Counted on the event loop, read by the heartbeat thread; each field is one word, so no lock is needed."""

    #: Pushes that came whole.
    pushes: int = 0
    #: Has every transport.
    traffic: dict[Transport, Traffic] = field(default_factory=lambda: {each: Traffic() for each in Transport})
    #: Of the last push that was applied.
    staleness: int = 0
    #: Pushes that were not applied: late, too stale, or of a step that raised.
    dropped: int = 0
    #: Pushes refused with an error, by model and the error's code.
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    _last: tuple[float, int, int, float, float] = field(default_factory=lambda: (time.monotonic(), 0, 0, 0.0, 0.0))

    @property
    def bytes(self) -> int:
        """Payload bytes in and out."""
        return sum(each.received + each.sent for each in self.traffic.values())

    def stats(self, times: Sequence[StepTimes] = ()) -> MemberStats:
        """Totals, and rates since the last call. ``times``: of the models that the shard holds now."""
        then, pushes, nbytes, waited, byte_waited = self._last
        now, total = time.monotonic(), self.bytes
        queued = sum(each.queued for each in times)
        queued_bytes = sum(each.queued_bytes for each in times)
        self._last = (now, self.pushes, total, queued, queued_bytes)
        seconds = max(now - then, 1e-3)
        return MemberStats(
            steps=self.pushes,
            steps_per_second=(self.pushes - pushes) / seconds,
            bytes_per_second=(total - nbytes) / seconds,
            staleness=self.staleness,
            dropped=self.dropped,
            # The seconds waited in a time, divided by it, are the mean length of the queue. Less than before: a model
            # was released.
            queued_pushes=max(0.0, queued - waited) / seconds,
            queued_bytes=max(0.0, queued_bytes - byte_waited) / seconds,
        )
