"""The size of batches follows the pauses they make. Costs nothing: no I/O, no clock."""

from __future__ import annotations

import pytest

from ps_server.coordinator.jobs.move_runner import BREATH_PAUSES, FIRST_BYTES, LEAST_BYTES, MOST_BYTES, MovePace
from ps_server.coordinator.times import BREATH_SECONDS, PAUSE_SECONDS


def after(*pauses: float) -> MovePace:
    pace = MovePace()
    for seconds in pauses:
        pace.paused(seconds)
    return pace


def test_short_pauses_make_larger_batches_up_to_a_limit():
    assert after().batch_bytes == FIRST_BYTES
    assert after(PAUSE_SECONDS / 3).batch_bytes == 2 * FIRST_BYTES
    assert after(*[PAUSE_SECONDS / 3] * 9).batch_bytes == MOST_BYTES


def test_long_pauses_make_smaller_ones_and_those_that_fit_change_nothing():
    assert after(PAUSE_SECONDS).batch_bytes == FIRST_BYTES
    assert after(4 * PAUSE_SECONDS).batch_bytes == FIRST_BYTES // 2
    assert after(4 * PAUSE_SECONDS, 2 * PAUSE_SECONDS, 1.1 * PAUSE_SECONDS).batch_bytes == max(
        FIRST_BYTES // 8, LEAST_BYTES
    )


def test_one_long_pause_after_another_is_not_yet_taken_for_the_rule():
    pace = after(10 * PAUSE_SECONDS, 10 * PAUSE_SECONDS)
    assert pace.batch_bytes == FIRST_BYTES // 4
    pace.paused(PAUSE_SECONDS)
    pace.paused(10 * PAUSE_SECONDS)
    assert pace.batch_bytes == max(FIRST_BYTES // 8, LEAST_BYTES)


def test_where_much_smaller_batches_pause_as_long_the_rest_goes_in_large_ones():
    pace = after(10 * PAUSE_SECONDS, 9 * PAUSE_SECONDS, 9 * PAUSE_SECONDS)
    assert pace.batch_bytes == MOST_BYTES
    pace.paused(10 * PAUSE_SECONDS)
    assert pace.batch_bytes == MOST_BYTES


def test_where_that_is_not_much_too_long_batches_are_as_large_as_they_were():
    pace = after(2 * PAUSE_SECONDS, 1.9 * PAUSE_SECONDS, 1.9 * PAUSE_SECONDS)
    assert pace.batch_bytes == FIRST_BYTES
    pace.paused(2 * PAUSE_SECONDS)
    assert pace.batch_bytes == FIRST_BYTES


def test_a_size_that_is_given_stays():
    pace = MovePace(7)
    for seconds in (0.0, 10.0):
        pace.paused(seconds)
        assert pace.batch_bytes == 7


@pytest.mark.parametrize(
    ("pause", "breath"),
    [(0.0, 0.0), (0.1, BREATH_PAUSES * 0.1), (2.0, 5.0), (4.0, 8.0)],
)
def test_training_goes_on_for_several_pauses(pause: float, breath: float):
    assert after(pause).breath_seconds == pytest.approx(BREATH_SECONDS + breath)
