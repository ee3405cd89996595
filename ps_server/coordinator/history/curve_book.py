"""Curves in fixed memory: a full book merges neighbouring points, and each then covers twice the time."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from ps_protocol.cluster.history import Curve, Curves

POINTS = 720
"""Most points of a curve; at least half of them are used once the book has been full."""

NAMES = 24
"""Most curves: the coordinator's own, and the first names that training scripts report."""

Key = tuple[str, bool]
"""Name of a curve, and whether it is reported."""


@dataclass(slots=True)
class Spread:
    """Values of one number: their mean, the least and the greatest."""

    total: float = 0.0
    count: int = 0
    low: float = math.inf
    high: float = -math.inf

    def take(self, mean: float, low: float, high: float) -> None:
        """Add one value; NaN is ignored."""
        if not math.isnan(mean):
            self.total += mean
            self.count += 1
            self.low, self.high = min(self.low, low), max(self.high, high)

    @property
    def values(self) -> tuple[float, float, float]:
        """Mean, least, greatest; NaN before the first value."""
        if not self.count:
            return math.nan, math.nan, math.nan
        return self.total / self.count, self.low, self.high


@dataclass(slots=True)
class _Lane:
    """One curve: finished points, and the current point."""

    mean: array[float] = field(default_factory=lambda: array("d"))
    low: array[float] = field(default_factory=lambda: array("d"))
    high: array[float] = field(default_factory=lambda: array("d"))
    open: Spread = field(default_factory=Spread)

    def close_point(self) -> None:
        for lane, value in zip((self.mean, self.low, self.high), self.open.values, strict=True):
            lane.append(value)
        self.open = Spread()

    def merge(self) -> None:
        merged = _Lane(open=self.open)
        for at in range(0, len(self.mean) - 1, 2):
            both = Spread()
            for point in (at, at + 1):
                both.take(self.mean[point], self.low[point], self.high[point])
            merged.open = both
            merged.close_point()
        self.mean, self.low, self.high = merged.mean, merged.low, merged.high


class CurveBook:
    """Called by its owner, with rising times in seconds since 1970."""

    def __init__(self, base_seconds: float, points: int = POINTS, names: int = NAMES) -> None:
        """``base_seconds``: the time that one point covers initially. ``points`` is even and at least 2."""
        if points < 2 or points % 2:
            raise ValueError("a book has an even number of points, at least 2")
        self._points = points
        self._names = names
        self._point_seconds = base_seconds
        self._times = array("d")
        self._lanes: dict[Key, _Lane] = {}
        self._open_at: float | None = None
        self._generation = 0

    def add(self, at: float, values: Mapping[Key, Spread]) -> None:
        """Add the values at this time. Names beyond the limit are dropped."""
        if self._open_at is None:
            self._open_at = at
        elif at - self._open_at >= self._point_seconds:
            self._close_point()
            self._open_at = at
        for key, spread in values.items():
            lane = self._lanes.get(key) or self._new_lane(key)
            if lane is not None and spread.count:
                lane.open.take(*spread.values)

    def curves(self) -> Curves:
        """A copy of all curves; the last point may still change."""
        times = self._times[:]
        if self._open_at is not None:
            times.append(self._open_at)
        curves = []
        for (name, reported), lane in self._lanes.items():
            copies = (lane.mean[:], lane.low[:], lane.high[:])
            if self._open_at is not None:
                for copy, value in zip(copies, lane.open.values, strict=True):
                    copy.append(value)
            curves.append(Curve(name, reported, *copies))
        return Curves(times, tuple(curves), self._point_seconds, self._generation)

    def restore(self, saved: Curves) -> None:
        """Continue from ``saved``, of a book of this size, after a gap. Only before the first ``add``."""
        # Make space for the gap: a book merges when it has exactly its most points.
        cut = slice(0, self._points - 1)
        self._times = array("d", saved.times[cut])
        if not self._times:
            return
        self._point_seconds = max(self._point_seconds, saved.point_seconds)
        self._generation = saved.generation
        for each in saved.curves[: self._names]:
            mean, low, high = (array("d", lane[cut]) for lane in (each.mean, each.low, each.high))
            self._lanes[each.name, each.reported] = _Lane(mean, low, high)
        # A point without values, for the time without a coordinator.
        self._open_at = self._times[-1] + self._point_seconds
        self._close_point()
        self._open_at = None

    def _new_lane(self, key: Key) -> _Lane | None:
        if len(self._lanes) >= self._names:
            return None
        lane = self._lanes[key] = _Lane()
        unknown = array("d", [math.nan]) * len(self._times)
        lane.mean, lane.low, lane.high = unknown[:], unknown[:], unknown[:]
        return lane

    def _close_point(self) -> None:
        assert self._open_at is not None
        self._times.append(self._open_at)
        for lane in self._lanes.values():
            lane.close_point()
        if len(self._times) >= self._points:
            self._times = self._times[::2]
            for lane in self._lanes.values():
                lane.merge()
            self._point_seconds *= 2
            self._generation += 1
