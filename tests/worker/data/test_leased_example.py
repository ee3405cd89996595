"""An example as it is, in an elastic job: one worker is killed, another joins, and the level is reached."""

from __future__ import annotations

import threading
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


@contextmanager
def digits(job: Job, rank: int) -> Iterator[Interpreter]:
    command = (str(DIGITS), "--epochs", "4", "--batch-size", "16", "--expect-accuracy", "0.8")
    shared().load("sklearn.datasets")
    process = Interpreter(*command, PS_COORDINATOR=job.address, PS_RANK=str(rank))
    try:
        yield process
    finally:
        process.close()


@pytest.mark.parametrize("mode", choose([Mode.ASYNC, Mode.SYNC], [Mode.SYNC]))
def test_digits_is_learned_though_a_worker_is_killed_and_another_joins(mode: Mode) -> None:
    pause = threading.Event()
    settings = {"lease_seconds": 3.0, "consistency": Consistency(mode)}
    with running_job(workers=0, **settings) as job, digits(job, 0) as first, digits(job, 1) as killed:
        while len(job.view.live(Role.WORKER)) < 2:
            assert (first.poll(), killed.poll()) == (None, None)
            pause.wait(0.05)
        with digits(job, 2) as joined:
            while job.member(Role.WORKER, 1).stats.steps < 5:
                assert (first.poll(), killed.poll()) == (None, None)
                pause.wait(0.05)
            killed.kill()
            said = first.stdout.read()
            assert (first.wait(), joined.wait()) == (0, 0), said
            assert "test accuracy" in said
        assert job.gone(2) == "left"
        assert job.member(Role.WORKER, 2).stats.steps > 0
