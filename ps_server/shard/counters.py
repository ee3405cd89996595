"""What a shard tells the coordinator with each heartbeat."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ps_protocol.cluster.view import MemberStats


@dataclass(slots=True)
class Counters:
    """Counted on the event loop, read by the heartbeat thread; each field is one word, so no lock is needed."""

    pushes: int = 0
    #: Payload bytes in and out.
    bytes: int = 0
    staleness: int = 0
    #: Pushes that were not applied: late, too stale, or of a step that raised.
    dropped: int = 0
    _last: tuple[float, int, int] = field(default_factory=lambda: (time.monotonic(), 0, 0))

    def stats(self) -> MemberStats:
        """Totals, and rates since the last call."""
        then, pushes, nbytes = self._last
        now = time.monotonic()
        self._last = (now, self.pushes, self.bytes)
        seconds = max(now - then, 1e-3)
        return MemberStats(
            steps=self.pushes,
            steps_per_second=(self.pushes - pushes) / seconds,
            bytes_per_second=(self.bytes - nbytes) / seconds,
            staleness=self.staleness,
            dropped=self.dropped,
        )
