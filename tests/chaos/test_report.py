"""What a report calls broken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chaos.report import Runs, broken, lines
from chaos.run import Outcome

GOOD = Outcome(
    seconds=100.0,
    steps=900,
    acknowledged=1000,
    worker_lives=5,
    versions=(1000, 1002),
    loss=0.52,
    served_is_replayed=True,
    ended=("shard 0: 1",),
)
RUNS = Runs(GOOD, replace(GOOD, steps=1000), [replace(GOOD, loss=loss) for loss in (0.50, 0.51, 0.53)])


def test_a_run_that_kept_its_promises_is_not_broken():
    assert list(broken(RUNS, 0.9)) == []
    text = "\n".join(lines(RUNS, []))
    assert "goodput     90.0%" in text
    assert "the same bits" in text
    assert "shard 0: 1" in text


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"served_is_replayed": False}, "the shards serve other bits than their logs make"),
        ({"versions": (1000, 999)}, "1000 pushes were acknowledged to 5 lives of workers, and [1000, 999] applied"),
        ({"versions": (1006, 1000)}, "1000 pushes were acknowledged to 5 lives of workers, and [1006, 1000] applied"),
        ({"contradictions": ("two readers saw",)}, "two readers saw"),
        ({"loss": 1.0}, "the final loss is not within 0.3"),
        ({"loss": float("nan")}, "the final loss is not within 0.3"),
        ({"steps": 800}, "goodput is 80.0%, less than 90%"),
    ],
)
def test_a_broken_promise_is_named(change, sentence):
    (found,) = broken(replace(RUNS, disturbed=replace(GOOD, **change)), 0.9)
    assert found.startswith(sentence)


def test_what_was_not_measured_is_not_judged():
    runs = Runs(replace(GOOD, loss=9.0), None, [])
    assert list(broken(runs, 0.9)) == []
    assert "goodput" not in "\n".join(lines(runs, []))
