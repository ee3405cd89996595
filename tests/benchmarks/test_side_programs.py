"""What the programs beside ``make bench`` make of their samples."""

from __future__ import annotations

import os

import pytest

from benchmarks import crowd, startup, tensorflow
from benchmarks.forked import answers, forked


def test_rates_of_rows_are_medians_and_the_ratio_that_of_neighbours() -> None:
    blocks = [(([0.001, 0.001], [0.004]), ([0.002], [0.004])), (([0.002], [0.002]), ([0.008], [0.008]))]
    assert tensorflow.row("bulk", 1000, blocks) == (
        "bulk    pulled: 0.75 M/s, TensorFlow 0.31, ratio 3.00 [2.50 - 3.50]   "
        "pulled and pushed: 0.38 M/s, TensorFlow 0.19, ratio 2.50 [1.75 - 3.25]"
    )


def test_jobs_are_shown_with_their_extremes() -> None:
    jobs = [startup.Job(3.0, 0.5, 9.0), startup.Job(4.0, 0.25, 8.0), startup.Job(5.0, 0.75, 10.0)]
    assert startup.row("this", jobs) == "this      4.00 (3.00 - 5.00)    0.50 (0.25 - 0.75)    9.00 (8.00 - 10.00)"


def test_steps_of_all_workers_are_counted_together() -> None:
    assert crowd.row("shm, 2 workers", 2.0, [[0.001] * 30, [0.003] * 10]) == (
        "shm, 2 workers                    20 steps/s   median   1.00 ms   p99   3.00 ms   10 to 30 steps each"
    )


def test_a_forked_function_answers_and_one_that_fails_is_an_error() -> None:
    assert answers([forked(max, 3, 5), forked(os.getppid)]) == [5, os.getpid()]
    with pytest.raises(ChildProcessError, match="has ended with code 1"):
        answers([forked(int, "three")])
