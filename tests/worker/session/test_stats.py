"""Rates are what happened in the last seconds; totals are what happened at all."""

from __future__ import annotations

import pytest

from ps_worker.session.reporting import StatsWindow


def test_steady_steps_give_their_rate() -> None:
    window = StatsWindow(window_seconds=10)
    for tick in range(201):
        window.record_samples(tick / 10, 32)
        window.record_step(tick / 10, 1000, 3)
    stats = window.snapshot(20.0)
    assert stats.steps == 201
    assert stats.staleness == 3
    assert stats.steps_per_second == pytest.approx(10, rel=0.03)
    assert stats.samples_per_second == pytest.approx(320, rel=0.03)
    assert stats.bytes_per_second == pytest.approx(10_000, rel=0.03)


def test_the_first_step_gives_no_rate_yet() -> None:
    window = StatsWindow()
    assert window.snapshot(5.0).steps_per_second == 0
    window.record_step(5.0, 10, 0)
    assert window.snapshot(5.0).steps_per_second == 0
    assert window.snapshot(5.0).steps == 1


def test_time_before_the_first_step_does_not_count() -> None:
    window = StatsWindow()
    for second in range(1000, 1005):
        window.record_step(float(second), 10, 0)
    assert window.snapshot(1004.0).steps_per_second == pytest.approx(1.0)


def test_a_pause_brings_the_rate_to_zero_and_is_forgotten_afterwards() -> None:
    window = StatsWindow(window_seconds=10)
    for tick in range(100):
        window.record_step(tick / 10, 10, 0)
    assert window.snapshot(60.0).steps_per_second == pytest.approx(0, abs=0.3)
    for tick in range(600, 800):
        window.record_step(tick / 10, 10, 0)
    assert window.snapshot(80.0).steps_per_second == pytest.approx(10, rel=0.05)


def test_memory_does_not_grow_with_the_number_of_steps() -> None:
    window = StatsWindow(window_seconds=10)
    for tick in range(100_000):
        window.record_step(tick / 1000, 1, 0)
    assert len(window._marks) < 50
