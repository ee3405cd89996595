"""The real decisions keep their promises through faults, whatever the seed."""

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from simulation.plan import ALL_FAULTS, Fault, Size
from tests.simulation.runs import run
from tests.support.length import choose


@pytest.mark.parametrize("seed", range(choose(16, 2)))
def test_a_seed_breaks_no_promise(seed):
    assert run(seed).violation == "", f"replay with: python -m simulation --seed {seed} --trace"


@pytest.mark.parametrize(
    "fixed",
    [
        {"wire": "int8"},
        {"wire": "topk:0.3", "overlap": True},
        {"standby": True, "durable": True, "acknowledged_after": False},
    ],
    ids=str,
)
def test_formats_and_standbys_break_no_promise(fixed):
    assert run(2, change=lambda plan: replace(plan, **fixed)).violation == ""


def test_every_kind_of_fault_comes_and_breaks_no_promise():
    faults = tuple(Fault(2.0 + 0.7 * number, kind) for number, kind in enumerate(ALL_FAULTS))
    outcome = run(0, change=lambda plan: replace(plan, faults=faults, quiet_at=15.0, durable=True))
    assert outcome.violation == ""
    assert outcome.faults.keys() == set(ALL_FAULTS)


def test_eight_shards_and_many_workers_break_no_promise():
    outcome = run(1, Size(shards=8, workers=choose(20, 12), steps=1))
    assert outcome.violation == ""
    assert outcome.pushes or outcome.replies


def test_without_faults_all_work_is_done_and_applied():
    outcome = run(3, Size(faults=()))
    assert outcome.violation == ""
    assert outcome.replies >= 4 * 6 * 6


def test_a_seed_gives_the_same_history_in_every_process():
    digests = []
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-m", "simulation", "--seed", "7", "--trace", "--steps", str(choose(6, 3))],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            text=True,
        )
        digests.append(re.sub(r"torch-ps-simulation-\w+", "folder", done.stdout))
    assert digests[0] == digests[1]
    assert len(digests[0].splitlines()) > 50
