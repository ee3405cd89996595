"""Definitions are checked where they are made; histograms count what they are given."""

import random

import pytest

from ps_protocol.metrics.definition import Catalogue, HistogramValue
from ps_protocol.metrics.histogram import Histogram
from tests.support.seeds import drawn_seed


def test_a_name_that_is_taken_is_refused_also_by_a_catalogue_that_includes_it():
    common = Catalogue("process")
    common.gauge("version", "Text.")
    with pytest.raises(ValueError, match="torch_ps_version is defined twice"):
        Catalogue("shard", "shard", common).gauge("version", "Text.")


@pytest.mark.parametrize("kind", ["gauge", "histogram"])
def test_only_a_counter_ends_with_total(kind):
    with pytest.raises(ValueError, match="a counter ends with _total"):
        getattr(Catalogue("shard"), kind)("steps_total", "Text.")
    with pytest.raises(ValueError, match="a counter ends with _total"):
        Catalogue("shard").counter("steps", "Text.")


def test_a_label_that_every_metric_has_is_not_given_again():
    with pytest.raises(ValueError, match="every metric here has the label shard"):
        Catalogue("shard", "shard").gauge("rows", "Text.", "shard")


def test_a_sample_has_a_value_for_each_label():
    rows = Catalogue("shard").gauge("rows", "Text.", "model", "table")
    assert rows.of(3, "net", "users").labels == ("net", "users")
    with pytest.raises(ValueError, match="has labels"):
        rows.of(3, "net")


def test_a_histogram_counts_values_below_and_at_each_bound():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.value == HistogramValue((1.0, 2.0), (2, 2, 1), 14.0)


def test_a_histogram_of_random_values_has_each_once():
    seed = drawn_seed()
    draw, histogram = random.Random(seed), Histogram()
    values = [10 ** draw.uniform(-7, 4) for _ in range(500)]
    for value in values:
        histogram.observe(value)
    found = histogram.value
    low = 0.0
    for high, count in zip((*found.bounds, float("inf")), found.counts, strict=True):
        assert count == sum(low < value <= high for value in values)
        low = high
    assert found.sum == pytest.approx(sum(values))
