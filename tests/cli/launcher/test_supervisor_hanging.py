"""Servers and workers that live and do nothing: killed, and started again within the restarts."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from ps_protocol.times import JOINING_SECONDS
from ps_server.cli.launcher.events import Exited, Finish, Interrupted, Send, ServerHangs, StartProcess, WorkersWanted
from tests.cli.launcher.supervised_job import COORDINATOR, SHARD, WORKERS, Job

WHY = "the coordinator has lost it, for its lease of 20 s ended"


@pytest.mark.parametrize("server", [SHARD, COORDINATOR])
def test_a_server_that_hangs_is_killed_once_and_started_again_out_of_the_restarts_of_servers(server):
    job = Job(server_restarts=2).ready()
    job.now += 60.0
    assert job.see(ServerHangs(server, WHY)) == [Send(server, signal.SIGKILL)]
    # It takes its time to end, or the coordinator tells it again.
    assert job.see(ServerHangs(server, WHY)) == []
    assert job.exits(server, -9) == [StartProcess(server)]
    assert job.said == [
        f"{server} hangs: {WHY}; it is killed",
        f"{server} hung and was killed; starting it again (restart 1 of 2)",
    ]
    # Its next life is another one.
    assert job.see(ServerHangs(server, WHY)) == [Send(server, signal.SIGKILL)]
    assert job.supervisor.failures == [f"{server} hung and was killed"]


def test_when_the_restarts_are_used_up_the_job_ends_at_once():
    job = Job(server_restarts=1).ready()
    job.exits(COORDINATOR, -9)
    job.now += 60.0
    job.see(ServerHangs(SHARD, WHY))
    assert job.exits(SHARD, -9) == [Send(worker, signal.SIGTERM) for worker in WORKERS]
    assert job.said[-1] == (
        "shard 0 hung and was killed before the job was done, and --restart-servers 1 is used up; stopping the job"
    )


def test_without_a_data_directory_a_server_that_hangs_ends_the_job():
    job = Job().ready()
    job.see(ServerHangs(SHARD, WHY))
    assert job.exits(SHARD, -9) == [Send(worker, signal.SIGTERM) for worker in WORKERS]
    for worker in WORKERS:
        job.exits(worker)
    assert job.exits(COORDINATOR) == [Finish(137)]


def test_a_server_that_went_on_and_ended_by_itself_takes_one_restart():
    job = Job(server_restarts=2).ready()
    job.now += 60.0
    job.see(ServerHangs(SHARD, WHY))
    # SIGCONT came first: it was fenced, and the signal did not find it.
    assert job.exits(SHARD, 1) == [StartProcess(SHARD)]
    assert "(restart 1 of 2)" in job.said[-1]


def test_one_in_whose_place_another_process_serves_is_killed_and_does_not_fight_for_it():
    job = Job(server_restarts=2).ready()
    job.now += 60.0
    assert job.see(ServerHangs(SHARD, WHY, replaced=True)) == [Send(SHARD, signal.SIGKILL)]
    assert job.exits(SHARD, -9) == []
    assert job.said[-1] == "shard 0 hung and was killed; another process serves in its place"
    for worker in WORKERS:
        job.exits(worker)
    assert job.exits(COORDINATOR) == [Finish(0)]


def test_processes_that_are_gone_or_are_told_to_end_are_left_alone():
    job = Job(server_restarts=2).ready()
    job.now += 60.0
    job.see(ServerHangs(SHARD, WHY))
    job.see(Exited(SHARD, -9))
    job.see(Interrupted(signal.SIGINT))
    assert job.see(ServerHangs(SHARD, WHY)) == []
    assert job.see(ServerHangs(COORDINATOR, WHY)) == []


def hanging(**plan: Any) -> Job:
    """A job that has run for long."""
    job = Job(**plan).ready()
    job.now += JOINING_SECONDS
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
