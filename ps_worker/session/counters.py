"""What a worker counts of its steps, for metrics and heartbeats: durations, waits by reason, reconnects."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from ps_protocol.metrics.histogram import Histogram


class WaitReason(enum.Enum):
    """What the training thread, or with ``overlap`` the exchange beside it, waits for."""

    #: The shards: their updates, and the transfer.
    PULL = "pull"
    #: Other workers, for the bound of mode ssp.
    BOUND = "bound"
    #: Other workers, for the round of mode sync.
    ROUND = "round"
    #: A shard that is away.
    RECONNECT = "reconnect"


@dataclass(slots=True)
class WorkerCounters:
    """Written by the threads that make steps, one at a time; read by any: each number is one word."""

    #: Duration of ``optimizer.step()``, in seconds.
    step: Histogram = field(default_factory=Histogram)
    #: In seconds; has every reason.
    waits: dict[WaitReason, float] = field(default_factory=lambda: dict.fromkeys(WaitReason, 0.0))
    #: Between two steps of this process, whatever the models.
    compute_seconds: float = 0.0
    #: Streams opened again after a step had been made.
    reconnects: int = 0
    #: Steps whose gradients held NaN or infinity, refused or skipped by this worker.
    nonfinite: int = 0
    _ended: float = 0.0

    def begins(self, now: float) -> None:
        """A step begins at ``now``, seconds of a steady clock."""
        if self._ended:
            self.compute_seconds += now - self._ended

    def ends(self, began: float, now: float) -> None:
        """The step that began at ``began`` has ended."""
        self.step.observe(now - began)
        self._ended = now

    def answered(self, seconds: float, waited: float, reconnecting: float, others: WaitReason) -> None:
        """The answers to a push came after ``seconds``.

        Of these the shards ``waited`` for other workers, for the reason ``others``, and ``reconnecting`` seconds are
        counted already.
        """
        here = max(0.0, seconds - reconnecting)
        waited = min(waited, here)
        self.waits[others] += waited
        self.waits[WaitReason.PULL] += here - waited
