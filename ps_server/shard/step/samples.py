"""Samples the gradients of a model that are applied on arrival: heartbeats report their norm and their staleness."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from ps_protocol.cluster.view import UpdateCounts
from ps_server.optimizers.gradients import squared_norm
from ps_server.state.replica import Step

SHARE = 0.01
"""Samples take at most this part of the time."""

LEAST_SECONDS = 0.02
"""Between two samples, at least."""


class GradientSamples:
    """``sample`` is called in the executor, ``take`` by the heartbeat thread; what they share is replaced as one."""

    def __init__(self) -> None:
        self._due = 0.0
        #: Samples since ``take``, and the sum of the logarithms of their squared norms.
        self._sums: tuple[int, float] = (0, 0.0)
        #: Pushes by staleness, at the last ``take``; None before the first.
        self._counts: Sequence[int] | None = None

    def sample(self, step: Step, now: float, squared: float | None = None) -> None:
        """Look at the gradients of ``step``, if it is time. ``now``: seconds of ``time.perf_counter``.

        ``squared``: where gradients are clipped, the squared norm of the whole push before that.
        """
        if now < self._due:
            return
        # Of this thread alone: a machine that is busy with others makes no sample dearer.
        began = time.thread_time()
        if squared is None:
            squared = squared_norm(step.gradients, step.absent, step.tables)
        self._due = now + max(LEAST_SECONDS, (time.thread_time() - began) / SHARE)
        if squared != 0.0:
            count, total = self._sums
            self._sums = count + 1, total + (math.log(squared) if math.isfinite(squared) else math.inf)

    def take(self, model: str, counts: Sequence[int]) -> UpdateCounts | None:
        """What has come since the last call; None where nothing was updated. ``counts``: all pushes by staleness."""
        (samples, total), self._sums = self._sums, (0, 0.0)
        before, self._counts = self._counts, tuple(counts)
        pushes = [now - then for now, then in zip(self._counts, before or self._counts, strict=True)]
        if not (every := sum(pushes)):
            return None
        return UpdateCounts(
            model,
            math.exp(total / samples / 2) if samples and math.isfinite(total) else math.inf if samples else 0.0,
            sum(staleness * count for staleness, count in enumerate(pushes)) / every,
            next(staleness for staleness in range(len(pushes)) if sum(pushes[: staleness + 1]) >= 0.99 * every),
        )
