"""What happens to the processes of one task of Slurm: pure."""

from __future__ import annotations

import signal

import pytest

from ps_server.cli.launcher.events import (
    CoordinatorReady,
    DeadlinePassed,
    Exited,
    Finish,
    Interrupted,
    ProcessName,
    ProcessRole,
    Say,
    Send,
    ServerHangs,
    StartProcess,
)
from ps_server.cli.launcher.slurm.task_supervisor import TaskSupervisor

COORDINATOR, SHARD, WORKER = (
    ProcessName(ProcessRole.COORDINATOR),
    ProcessName(ProcessRole.SHARD, 1),
    ProcessName(ProcessRole.WORKER, 2),
)


def begun(*processes, workers=0, servers=0):
    supervisor = TaskSupervisor(processes, workers, servers)
    assert supervisor.start(0.0) == [StartProcess(process) for process in processes]
    assert supervisor.handle(CoordinatorReady(), 0.0) == []
    return supervisor


def acts(commands):
    return [command for command in commands if not isinstance(command, Say)]


def test_a_task_ends_when_all_its_processes_have_ended_by_themselves():
    supervisor = begun(COORDINATOR, SHARD, WORKER)
    assert supervisor.handle(Exited(WORKER, 0), 20.0) == []
    assert supervisor.handle(Exited(SHARD, 0), 21.0) == []
    assert supervisor.handle(Exited(COORDINATOR, 0), 22.0) == [Finish(0)]
    assert supervisor.failures == []


@pytest.mark.parametrize(("process", "limits"), [(WORKER, {"workers": 1}), (SHARD, {"servers": 1})])
def test_a_killed_process_is_started_again_as_often_as_allowed(process, limits):
    supervisor = begun(process, **limits)
    say, start = supervisor.handle(Exited(process, -9), 30.0)
    assert "(restart 1 of 1)" in say.text
    assert start == StartProcess(process)
    assert acts(supervisor.handle(Exited(process, -9), 60.0)) == [Finish(137)]
    assert len(supervisor.failures) == 2


def test_a_server_that_fails_at_its_first_start_is_not_started_again():
    assert acts(begun(SHARD, servers=5).handle(Exited(SHARD, 2), 1.0)) == [Finish(2)]


def test_a_worker_that_fails_for_good_ends_the_task_and_its_servers_a_little_later():
    supervisor = begun(COORDINATOR, WORKER)
    assert acts(supervisor.handle(Exited(WORKER, 7), 30.0)) == []
    assert supervisor.deadline == 35.0
    assert supervisor.handle(DeadlinePassed(), 35.0) == [Send(COORDINATOR, signal.SIGTERM)]
    assert supervisor.handle(Exited(COORDINATOR, 0), 36.0) == [Finish(7)]


@pytest.mark.parametrize(
    ("received", "sent", "code"),
    [(signal.SIGTERM, signal.SIGTERM, 143), (signal.SIGINT, signal.SIGINT, 130), (signal.SIGHUP, signal.SIGTERM, 129)],
)
def test_a_signal_ends_scripts_first_then_servers_and_then_kills(received, sent, code):
    supervisor = begun(COORDINATOR, SHARD, WORKER, workers=3, servers=3)
    assert acts(supervisor.handle(Interrupted(received), 30.0)) == [Send(WORKER, sent)]
    assert supervisor.handle(DeadlinePassed(), 35.0) == [
        Send(WORKER, signal.SIGKILL),
        Send(COORDINATOR, signal.SIGTERM),
        Send(SHARD, signal.SIGTERM),
    ]
    # What ends now is not started again.
    assert supervisor.handle(Exited(WORKER, -9), 35.0) == []
    assert supervisor.handle(Exited(COORDINATOR, 0), 36.0) == []
    assert supervisor.handle(DeadlinePassed(), 55.0) == [Send(SHARD, signal.SIGKILL)]
    assert supervisor.handle(Exited(SHARD, -9), 56.0) == [Finish(code)]


def test_a_task_restarts_workers_where_it_has_one_with_restarts():
    assert begun(WORKER, workers=1).restarts_workers
    assert not begun(SHARD, workers=1, servers=1).restarts_workers
    assert not begun(WORKER).restarts_workers


def test_a_second_interrupt_kills_and_a_restart_that_waits_is_given_up():
    supervisor = begun(SHARD, WORKER, workers=3)
    assert acts(supervisor.handle(Exited(WORKER, 1), 1.0)) == [StartProcess(WORKER)]
    (said,) = supervisor.handle(Exited(WORKER, 1), 1.5)
    assert said == Say("worker 2 exited with code 1; starting it again in 0.5 s (restart 2 of 3)")
    assert acts(supervisor.handle(Interrupted(signal.SIGINT), 1.6)) == []
    assert supervisor.handle(Interrupted(signal.SIGTERM), 2.0) == []
    assert supervisor.handle(Interrupted(signal.SIGINT), 2.0) == [Send(SHARD, signal.SIGKILL)]
    assert supervisor.handle(Exited(SHARD, -9), 2.0) == [Finish(130)]


def test_a_server_that_hangs_is_killed_and_started_again_within_the_restarts():
    supervisor = begun(COORDINATOR, SHARD, servers=1)
    hangs = ServerHangs(SHARD, "its lease ended")
    assert acts(supervisor.handle(hangs, 60.0)) == [Send(SHARD, signal.SIGKILL)]
    assert supervisor.handle(hangs, 61.0) == []
    say, start = supervisor.handle(Exited(SHARD, -9), 62.0)
    assert say.text == "shard 1 hung and was killed; starting it again (restart 1 of 1)"
    assert start == StartProcess(SHARD)
    assert acts(supervisor.handle(hangs, 90.0)) == [Send(SHARD, signal.SIGKILL)]
    (say,) = supervisor.handle(Exited(SHARD, -9), 91.0)
    assert say.text == "shard 1 hung and was killed; ending this task"


def test_one_in_whose_place_another_process_serves_does_not_come_back():
    supervisor = begun(SHARD, WORKER, servers=1)
    supervisor.handle(ServerHangs(SHARD, "its lease ended", replaced=True), 60.0)
    assert acts(supervisor.handle(Exited(SHARD, -9), 62.0)) == []
    assert supervisor.deadline is None
    assert supervisor.handle(Exited(WORKER, 0), 63.0) == [Finish(0)]
