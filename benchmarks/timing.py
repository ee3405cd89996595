"""How a step is timed and how timings become figures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

PERCENTILE_SAMPLES = 100
"""Fewer samples than this have no 99th percentile."""


class Loop:
    """Runs named operations and times each one. The object that worker children hold; used from one thread."""

    def __init__(
        self,
        operations: Mapping[str, Callable[[], object]],
        before: Mapping[str, Callable[[], object]] = MappingProxyType({}),
    ) -> None:
        """``before``: what is run before each run of an operation, and not timed."""
        self._operations = operations
        self._before = before

    def run(self, operation: str, count: int, warm_up: int = 0) -> list[float]:
        """Seconds of each of ``count`` runs, after ``warm_up`` that are not counted."""
        run, prepare = self._operations[operation], self._before.get(operation, _nothing)
        seconds = []
        for _ in range(warm_up + count):
            prepare()
            begin = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begin)
        return seconds[warm_up:]

    def run_between(self, operation: str, first: float, last: float) -> list[float]:
        """Seconds of each of the runs that begin between two times of perf_counter, which processes share; one at
        least.
        """
        run, prepare = self._operations[operation], self._before.get(operation, _nothing)
        taken: list[float] = []
        time.sleep(max(0.0, first - time.perf_counter()))
        while not taken or time.perf_counter() < last:
            prepare()
            begin = time.perf_counter()
            run()
            taken.append(time.perf_counter() - begin)
        return taken


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Figures:
    """What was measured of one thing, in one unit."""

    median: float
    #: Quartiles of all samples.
    low: float
    high: float
    samples: int
    #: The median of each round: rounds of rows in one group lie side by side in time, and ratios are taken per round.
    rounds: tuple[float, ...]
    #: 99th percentile; None with few samples.
    p99: float | None = None

    @classmethod
    def of(cls, rounds: Sequence[Sequence[float]]) -> Figures:
        """Figures of samples taken in ``rounds``, each with one sample at least."""
        samples = sorted(sample for taken in rounds for sample in taken)
        low, high = samples[0], samples[-1]
        if len(samples) > 1:
            low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
        p99 = samples[len(samples) * 99 // 100] if len(samples) >= PERCENTILE_SAMPLES else None
        medians = tuple(map(statistics.median, rounds))
        return cls(statistics.median(samples), low, high, len(samples), medians, p99)

    def to_json(self) -> dict[str, Any]:
        """As it stands in the results."""
        return {name: value for name, value in vars(self).items() if value is not None}
