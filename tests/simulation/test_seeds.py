"""The real decisions keep their promises through faults, whatever the seed."""

import os
import subprocess
import sys

import pytest

from simulation.plan import ALL_FAULTS, Size
from tests.simulation.runs import run


def test_sixty_seeds_with_every_fault_break_no_promise():
    outcomes = [run(seed) for seed in range(60)]
    broken = {outcome.seed: outcome.violation for outcome in outcomes if outcome.violation}
    assert broken == {}, f"replay with: python -m simulation --seed {min(broken)} --trace"
    came = {kind for outcome in outcomes for kind, count in outcome.faults.items() if count}
    assert came == set(ALL_FAULTS)


def test_sixteen_shards_and_a_hundred_workers_break_no_promise():
    for seed in range(2):
        outcome = run(seed, Size(shards=16, workers=100, steps=1))
        assert outcome.violation == "", f"seed {seed}"
        assert outcome.pushes or outcome.replies


#: Each was a violation when it was found; docs/simulation.md says what it showed.
FOUND = (54, 541, 558, 901, 1995, 3949, 9561)


@pytest.mark.parametrize("seed", FOUND)
def test_a_seed_that_once_found_a_bug_finds_it_no_more(seed):
    assert run(seed).violation == ""


def test_without_faults_all_work_is_done_and_applied():
    outcome = run(3, Size(faults=()))
    assert outcome.violation == ""
    assert outcome.replies >= 4 * 6 * 6


def test_a_seed_gives_the_same_history_in_every_process():
    digests = []
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-m", "simulation", "--seed", "7", "--trace"],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            text=True,
        )
        digests.append(done.stdout)
    assert digests[0] == digests[1]
    assert len(digests[0].splitlines()) > 50
