"""What a shard samples of gradients, and what its heartbeats report of them."""

from __future__ import annotations

import math
import time

import pytest

from ps_protocol.cluster.view import UpdateCounts
from ps_protocol.model.layout import Layout
from ps_server.optimizers import gradients
from ps_server.shard.step import samples
from ps_server.shard.step.samples import LEAST_SECONDS, SHARE, GradientSamples
from ps_server.state.region import Region
from ps_server.state.replica import Step
from tests.support.shards import simple_spec, whole_map

LAYOUT = Layout.of(whole_map(simple_spec((3,), (4,))), 0)


def step(*values: float, absent: frozenset[int] = frozenset()) -> Step:
    region = Region(LAYOUT)
    for index, value in enumerate(values):
        region.slice(index).fill_(value)
    return Step(region, absent, [{}])


def counts(*pushes: int) -> list[int]:
    """Pushes by staleness."""
    return [*pushes, *[0] * (8 - len(pushes))]


def begun() -> GradientSamples:
    sampled = GradientSamples()
    assert sampled.take("m", counts()) is None
    return sampled


def test_the_norm_is_the_geometric_mean_of_those_sampled_since_the_last_call():
    sampled = begun()
    sampled.sample(step(1.0, 1.0), 100.0)
    sampled.sample(step(4.0, 4.0), 200.0)
    found = sampled.take("m", counts(2))
    assert found == UpdateCounts("m", pytest.approx(2.0 * math.sqrt(7.0)), 0.0, 0)
    assert sampled.take("m", counts(3)) == UpdateCounts("m", 0.0, 0.0, 0)
    assert sampled.take("m", counts(3)) is None


def test_slices_without_gradients_do_not_count():
    sampled = begun()
    sampled.sample(step(1.0, 9.0, absent=frozenset({1})), 100.0)
    found = sampled.take("m", counts(1))
    assert found is not None
    assert found.gradient_norm == pytest.approx(math.sqrt(3.0))


def test_staleness_is_that_of_the_pushes_since_the_last_call():
    sampled = GradientSamples()
    assert sampled.take("m", counts(90, 9, 1)) is None
    assert sampled.take("m", counts(90, 9, 1, 100)) == UpdateCounts("m", 0.0, 3.0, 3)
    assert sampled.take("m", counts(190, 9, 2, 100)) == UpdateCounts("m", 0.0, pytest.approx(2 / 101), 0)
    assert sampled.take("m", counts(285, 9, 7, 100)) == UpdateCounts("m", 0.0, pytest.approx(0.1), 2)


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_gradients_whose_squares_are_no_number_have_an_infinite_norm_once(value):
    sampled = begun()
    sampled.sample(step(1.0, value), 100.0)
    sampled.sample(step(1.0, 1.0), 200.0)
    found = sampled.take("m", counts(1))
    assert found is not None
    assert found.gradient_norm == (math.inf if not math.isfinite(value) else pytest.approx(3.98e19, rel=0.01))
    sampled.sample(step(1.0, 1.0), 300.0)
    assert sampled.take("m", counts(2)) == UpdateCounts("m", pytest.approx(math.sqrt(7.0)), 0.0, 0)


def test_gradients_of_zeros_are_no_sample():
    sampled = begun()
    sampled.sample(step(0.0, 0.0), 100.0)
    assert sampled.take("m", counts(1)) == UpdateCounts("m", 0.0, 0.0, 0)


def test_samples_take_one_percent_of_the_time(monkeypatch):
    taken, spent = [], 0.0

    def norm(*arguments):
        nonlocal spent
        spent += 0.003
        taken.append(arguments)
        return gradients.squared_norm(*arguments)

    monkeypatch.setattr(samples, "squared_norm", norm)
    monkeypatch.setattr(time, "thread_time", lambda: spent)
    sampled = begun()
    for millisecond in range(10_000):
        sampled.sample(step(1.0, 1.0), 50.0 + millisecond / 1000)
    assert len(taken) == pytest.approx(10.0 / (0.003 / SHARE), abs=1)


def test_quick_samples_have_a_pause_between_them(monkeypatch):
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    sampled, pushed = begun(), step(1.0, 1.0)
    seen = [sampled._sums[0] for at in range(100) if sampled.sample(pushed, 50.0 + at * LEAST_SECONDS / 10) is None]
    assert seen[-1] == pytest.approx(10, abs=1)
