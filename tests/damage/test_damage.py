"""A damaged file of a data directory is noticed and named, or makes no difference."""

from __future__ import annotations

from tests.damage.campaign import run
from tests.damage.subjects import SUBJECTS
from tests.support.seeds import drawn_seed


def test_a_random_damage_of_any_file_gives_the_right_state_or_a_refusal_that_names_it(tmp_path):
    seed = drawn_seed()
    report = run(SUBJECTS, tmp_path, seed=seed, damages=60)
    assert not report.failures, "\n".join(report.failures)
    assert sum(report.counts.values()) == 60
