"""What a metric is: its name, kind, help text and labels; and the samples that a process reads from its counters."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

PREFIX = "torch_ps_"

SECONDS = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Buckets of durations from 10 microseconds to 100 seconds."""


class MetricKind(enum.Enum):
    """The metric types of Prometheus that are used."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class HistogramValue:
    """How often values fell into each bucket. ``counts`` has one more entry than ``bounds``: what is above them all."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    #: Of all values.
    sum: float


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Its name has the prefix and ends with its base unit; a counter's ends with ``_total``."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()

    def of(self, value: float | HistogramValue, *labels: str) -> Sample:
        """A sample with one value for each label. Raises ValueError where their numbers differ."""
        if len(labels) != len(self.labels):
            raise ValueError(f"{self.name} has labels {self.labels}, got {labels}")
        return Sample(self, value, labels)


@dataclass(frozen=True, slots=True)
class Sample:
    """The value of a metric for one combination of label values."""

    metric: Metric
    value: float | HistogramValue
    labels: tuple[str, ...] = ()


class Catalogue:
    """The metrics of one role, in the order of their definition. Filled by the module that defines them."""

    def __init__(self, role: str, constant: str = "", *others: Catalogue) -> None:
        """``constant``: a label that every sample of a process of this role has; empty: none.

        ``others``: metrics that this role has, too.
        """
        self.role = role
        self.constant = constant
        self._own: list[Metric] = []
        self._others = others

    @property
    def own(self) -> Sequence[Metric]:
        """The metrics defined here."""
        return tuple(self._own)

    @property
    def metrics(self) -> Sequence[Metric]:
        """The metrics of a process of this role."""
        return tuple(metric for each in (*self._others, self) for metric in each.own)

    def counter(self, name: str, help: str, *labels: str) -> Metric:
        """Define a number that only rises. Raises ValueError."""
        return self._define(name, MetricKind.COUNTER, help, labels)

    def gauge(self, name: str, help: str, *labels: str) -> Metric:
        """Define a number that rises and falls. Raises ValueError."""
        return self._define(name, MetricKind.GAUGE, help, labels)

    def histogram(self, name: str, help: str, *labels: str) -> Metric:
        """Define a distribution. Raises ValueError."""
        return self._define(name, MetricKind.HISTOGRAM, help, labels)

    def _define(self, name: str, kind: MetricKind, text: str, labels: tuple[str, ...]) -> Metric:
        metric = Metric(PREFIX + name, kind, text, labels)
        if any(metric.name == known.name for known in self.metrics):
            raise ValueError(f"{metric.name} is defined twice")
        if name.endswith("_total") != (kind is MetricKind.COUNTER):
            raise ValueError(f"{metric.name}: a counter ends with _total, and nothing else does")
        if self.constant in labels and self.constant:
            raise ValueError(f"{metric.name}: every metric here has the label {self.constant}")
        self._own.append(metric)
        return metric


Read = Callable[[], Sequence[Sample]]
"""Reads the numbers of a process as they are now. Called from any thread. Raises Unavailable where it cannot."""
