"""What is counted where it happens on the coordinator, for metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ps_protocol.cluster.view import Role
from ps_protocol.metrics.histogram import Histogram


@dataclass(slots=True)
class CoordinatorCounters:
    """Since this process began. Written and read on the coordinator's event loop."""

    joins: Counter[Role] = field(default_factory=Counter)
    lease_expirations: Counter[Role] = field(default_factory=Counter)
    mode_changes: int = 0
    #: From a worker's arrival until the barrier opened for it, in seconds.
    barrier_wait: Histogram = field(default_factory=Histogram)
    #: By rank: incarnation, phase and time of the arrival at a barrier; None once it has opened.
    _arrivals: dict[int, tuple[int, int, float | None]] = field(default_factory=dict)

    def arrives(self, rank: int, incarnation: int, phase: int, now: float) -> None:
        """A worker reaches the barrier that ends ``phase``; a repetition changes nothing."""
        known = self._arrivals.get(rank)
        if known is None or known[:2] != (incarnation, phase):
            self._arrivals[rank] = incarnation, phase, now

    def passes(self, rank: int, now: float) -> None:
        """The barrier that it waited for has opened; a repetition changes nothing."""
        incarnation, phase, since = self._arrivals.get(rank, (0, 0, None))
        if since is not None:
            self._arrivals[rank] = incarnation, phase, None
            self.barrier_wait.observe(now - since)
