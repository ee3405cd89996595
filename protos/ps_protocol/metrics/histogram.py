"""A distribution of constant size that costs a fraction of a microsecond for each value."""

from __future__ import annotations

from bisect import bisect_left

from ps_protocol.metrics.definition import SECONDS, HistogramValue


class Histogram:
    """Written by one thread at a time, read by any. A value equal to a bound falls below it."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        """``bounds``: upper ends of the buckets, rising."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count ``value``."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def value(self) -> HistogramValue:
        """What has been counted so far."""
        return HistogramValue(self._bounds, tuple(self._counts), self._sum)
