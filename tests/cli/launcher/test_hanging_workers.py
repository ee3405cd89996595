"""Workers that run and are lost to the coordinator: killed and started again, within the restarts."""

from __future__ import annotations

import signal
from typing import Any

from ps_server.cli.launcher import hanging as rules
from ps_server.cli.launcher.events import Interrupted, Send, StartProcess, WorkersWanted
from tests.cli.launcher.supervised_job import WORKERS, Job


def hanging(**plan: Any) -> Job:
    """A job that has run for long."""
    job = Job(**plan).ready()
    job.now += rules.JOINING_SECONDS
    return job


def test_a_worker_that_hangs_is_killed_and_started_again():
    job = hanging(worker_restarts=2)
    assert job.see(WorkersWanted((1,))) == [Send(WORKERS[1], signal.SIGKILL)]
    assert job.said == ["worker 1 runs and is lost to the coordinator; it is killed"]
    assert job.exits(WORKERS[1], -9) == [StartProcess(WORKERS[1])]
    assert "(restart 1 of 2)" in job.said[-1]
    # It may take its time to join.
    assert job.see(WorkersWanted((1,))) == []


def test_workers_without_a_process_and_of_no_rank_are_not_killed():
    job = hanging(worker_restarts=2)
    job.exits(WORKERS[0])
    assert job.see(WorkersWanted((0, 7))) == []


def test_no_worker_is_killed_that_would_not_be_started_again():
    job = hanging(worker_restarts=1)
    assert job.see(WorkersWanted((0, 1))) == [Send(WORKERS[0], signal.SIGKILL)]
    assert job.said[-1] == "worker 1 is lost to the coordinator, and --restart-workers 1 is used up"
    job = hanging()
    assert job.see(WorkersWanted((0,))) == []


def test_a_job_that_ends_starts_no_workers_again():
    job = hanging(worker_restarts=2)
    job.see(Interrupted(signal.SIGINT))
    assert job.see(WorkersWanted((0, 1))) == []
