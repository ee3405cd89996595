"""Rates over the last seconds, and events."""

from __future__ import annotations

import pytest

from ps_server.coordinator.event_log import DECISIONS, EVENTS, EventLog
from ps_server.coordinator.history.recorder import RateWindow


def test_a_rate_is_over_the_last_seconds() -> None:
    window: RateWindow[str] = RateWindow(10.0)
    for second in range(30):
        window.take("rows", float(second), second if second < 15 else 15 + (second - 15) * 5)
    assert window.rate("rows") == pytest.approx(5.0)
    assert window.rate("unknown") == 0.0


def test_one_total_has_no_rate() -> None:
    window: RateWindow[str] = RateWindow(10.0)
    window.take("rows", 1.0, 100)
    assert window.rate("rows") == 0.0


def test_after_a_restart_the_count_starts_over() -> None:
    window: RateWindow[str] = RateWindow(10.0)
    for second, total in enumerate((100, 110, 0, 3)):
        window.take("rows", float(second), total)
    assert window.rate("rows") == 3.0


def test_a_key_that_is_not_kept_is_forgotten() -> None:
    window: RateWindow[str] = RateWindow(10.0)
    for second in range(3):
        window.take("gone", float(second), second)
    window.keep(["other"])
    assert window.rate("gone") == 0.0


def test_the_last_events_are_kept_with_rising_numbers() -> None:
    now = 100.0
    log = EventLog(lambda: now)
    for number in range(EVENTS + 5):
        now += 1
        log.add(f"event {number}", warning=number == EVENTS)
    kept = log.all
    assert len(kept) == EVENTS
    assert [event.number for event in kept] == list(range(6, EVENTS + 6))
    assert kept[-1].text == f"event {EVENTS + 4}"
    assert [event.text for event in kept if event.warning] == [f"event {EVENTS}"]
    assert kept[-1].at_seconds == now


def test_a_very_long_event_is_cut() -> None:
    log = EventLog()
    log.add("x" * 10_000)
    assert len(log.all[0].text) == 500


def test_the_last_decisions_are_kept_also_after_many_other_events():
    log = EventLog(lambda: 1.0)
    for number in range(DECISIONS + 2):
        log.add(f"decision {number}", warning=True, decision=True)
    for _ in range(EVENTS):
        log.add("a worker joined")
    assert [event.text for event in log.decisions] == [f"decision {number}" for number in range(2, DECISIONS + 2)]
    assert all(event.warning for event in log.decisions)
