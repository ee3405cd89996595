"""Trainings of the laboratory that diverge are noticed before a gradient is not finite; those that learn are not."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from benchmarks.learning.divergence import BEGINNINGS, Push, Recorded, main, warned_at
from benchmarks.learning.laboratory import Setting, train
from benchmarks.learning.tasks import Digits, NoisyQuadratic, Task
from ps_protocol.launch.rehearsal import speeds_of
from ps_protocol.model.spec import Consistency
from tests.support.length import few


def recorded(task: Task, pushes: int, optimizer: str = "SGD", workers: int = 4, **options: float) -> list[Push]:
    kept = Recorded(task)
    setting = Setting(optimizer, dict(options), Consistency(), workers, pushes, measures=1)
    train(kept, setting, speeds_of("exponential", workers, 0), 0)
    return kept.finite


@pytest.mark.parametrize("beat", [1, 4, 8])
def test_momentum_that_is_unstable_under_delay_is_noticed_long_before_it_is_nan(beat: int):
    pushes = recorded(NoisyQuadratic(), 700, lr=0.3, momentum=0.9)
    norm, loss = warned_at(pushes, beat)
    assert len(pushes) < 700
    assert norm is not None
    assert norm < len(pushes) / 3
    assert loss is not None
    assert loss < len(pushes) / 3


@pytest.mark.parametrize("beat", few([4, 1, 16]))
def test_trainings_that_learn_are_not_reported_wherever_the_watch_begins(beat: int):
    trainings = [
        recorded(NoisyQuadratic(), 600, lr=0.01, momentum=0.9),
        recorded(NoisyQuadratic(), 600, "Adam", lr=0.003),
        recorded(NoisyQuadratic(), 600, lr=0.05),
        recorded(Digits(), 120, "Adam", lr=0.003),
    ]
    for pushes in trainings:
        for part in BEGINNINGS:
            assert warned_at(pushes[round(part * len(pushes)) :], beat) == (None, None)


def test_the_program_prints_a_table():
    found = CliRunner().invoke(main, ["--task", "quadratic", "--workers", "4", "--pushes", "40", "--seeds", "1"])
    assert found.exit_code == 0, found.output
    assert "warned by the norm" in found.output
