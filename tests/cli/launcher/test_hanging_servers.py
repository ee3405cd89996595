"""Servers that live and serve no more: killed, and then what follows the loss of a server."""

from __future__ import annotations

import signal

import pytest

from ps_server.cli.launcher.events import Exited, Finish, Interrupted, Send, ServerHangs, StartProcess
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
