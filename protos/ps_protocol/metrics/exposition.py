"""Samples as the text formats of Prometheus and OpenMetrics, by prometheus_client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

from ps_protocol.metrics.definition import HistogramValue, Metric, MetricKind, Sample


def exposition(samples: Sequence[Sample], constant: Mapping[str, str], accept: str = "") -> tuple[bytes, str]:
    """The text of ``samples``, each with the ``constant`` labels, in the best format that ``accept`` allows; its type.

    ``accept`` is the HTTP header of that name.
    """
    registry = CollectorRegistry()
    registry.register(_Samples(samples, constant))
    encoder, content_type = choose_encoder(accept)
    return encoder(registry), content_type


class _Samples(Collector):
    def __init__(self, samples: Sequence[Sample], constant: Mapping[str, str]) -> None:
        self._samples = samples
        self._constant = constant

    def collect(self) -> Iterable[Family]:
        by_metric: dict[Metric, list[Sample]] = {}
        for sample in self._samples:
            by_metric.setdefault(sample.metric, []).append(sample)
        for metric, samples in by_metric.items():
            yield _family(metric, samples, self._constant)

    def describe(self) -> Iterator[Family]:
        return iter(())


def _family(metric: Metric, samples: Iterable[Sample], constant: Mapping[str, str]) -> Family:
    names, values = [*constant, *metric.labels], tuple(constant.values())
    if metric.kind is MetricKind.HISTOGRAM:
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=names)
        for sample in samples:
            found = sample.value
            assert isinstance(found, HistogramValue)
            bounds = [*map(floatToGoString, found.bounds), "+Inf"]
            buckets = list(zip(bounds, map(float, accumulate(found.counts)), strict=True))
            histogram.add_metric([*values, *sample.labels], buckets, found.sum)
        return histogram
    made = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    family = made(metric.name, metric.help, labels=names)
    for sample in samples:
        assert not isinstance(sample.value, HistogramValue)
        family.add_metric([*values, *sample.labels], float(sample.value))
    return family
