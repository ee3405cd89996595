"""Counts kept for status pages: outcomes of pushes, and the staleness of those applied."""

from __future__ import annotations

from ps_server.consistency.events import Verdict

STALENESS_BUCKETS = 64
"""Staleness is counted exactly below this, less one; the last bucket counts all beyond."""

FAILED = "failed"
"""The name under which pushes are counted whose step raised; there only where one has."""


class Counts:
    """Written by one Tracker; of constant size."""

    def __init__(self) -> None:
        #: Pushes by outcome name. A held push is counted once its round is taken, as applied.
        self.outcomes: dict[str, int] = {v.value: 0 for v in Verdict if v is not Verdict.HOLD}
        #: ``staleness[i]``: pushes applied with staleness i.
        self.staleness: list[int] = [0] * STALENESS_BUCKETS

    def applied(self, staleness: int) -> None:
        """Count one push that was applied."""
        self.outcomes[Verdict.APPLY.value] += 1
        self.staleness[min(staleness, STALENESS_BUCKETS - 1)] += 1

    def failed(self, pushes: int) -> None:
        """Of those counted as applied, so many made a step that raised and was skipped."""
        self.outcomes[Verdict.APPLY.value] -= pushes
        self.outcomes[FAILED] = self.outcomes.get(FAILED, 0) + pushes

    def dropped(self, verdict: Verdict) -> None:
        """Count one push that changed no parameter."""
        self.outcomes[verdict.value] += 1
