"""An example as it is, in an elastic job: one worker is killed, another joins, and the level is reached."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ps_protocol.cluster.view import Role
from ps_protocol.model.spec import Consistency, Mode
from tests.recovery.zygote import shared
from tests.support.interpreters import Interpreter
from tests.support.length import choose
from tests.worker.jobs import Job, running_job

DIGITS = Path(__file__).parents[3] / "examples" / "digits.py"

PAUSING = """
import runpy, sys
from ps_worker.optimizer import PsOptimizer

step, steps = PsOptimizer.step, 0
pauses = {int(number) for number in sys.argv.pop(1).split(",")}

def pausing(optimizer):
    global steps
    steps += 1
    if steps in pauses:
        print("pauses", flush=True)
        sys.stdin.readline()
    step(optimizer)

PsOptimizer.step = pausing
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script that says so before the steps of these numbers, and waits for a line."""


@contextmanager
def digits(job: Job, rank: int, pauses: str) -> Iterator[Interpreter]:
    command = (str(DIGITS), "--epochs", "4", "--batch-size", "16", "--expect-accuracy", "0.8")
    shared().load("sklearn.datasets")
    process = Interpreter("-c", PAUSING, pauses, *command, PS_COORDINATOR=job.address, PS_RANK=str(rank))
    try:
        yield process
    finally:
        process.close()


def go_on(*workers: Interpreter) -> None:
    for worker in workers:
        worker.stdin.write("\n")
        worker.stdin.flush()


@pytest.mark.parametrize("mode", choose([Mode.ASYNC, Mode.SYNC], [Mode.SYNC]))
def test_digits_is_learned_though_a_worker_is_killed_and_another_joins(mode: Mode) -> None:
    # In sync the first one stands still where the other does, which may have come a step later.
    middle = "1,6" if mode is Mode.ASYNC else "1"
    settings = {"consistency": Consistency(mode)}
    with running_job(workers=0, **settings) as job, digits(job, 0, middle) as first, digits(job, 1, "1,6") as killed:
        # Both have the model before one makes a step, and both stand still in the middle.
        assert [each.stdout.readline() for each in (first, killed)] == ["pauses\n"] * 2
        go_on(first, killed)
        waiting = [first, killed] if mode is Mode.ASYNC else [killed]
        assert [each.stdout.readline() for each in waiting] == ["pauses\n"] * len(waiting)
        with digits(job, 2, "1") as joined:
            assert joined.stdout.readline() == "pauses\n"
            killed.kill()
            go_on(joined)
            if first in waiting:
                go_on(first)
            said = first.stdout.read()
            assert (first.wait(), joined.wait()) == (0, 0), said
            assert "test accuracy" in said
        assert job.gone(2) == "left"
        assert job.member(Role.WORKER, 2).stats.steps > 0
