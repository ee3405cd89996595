import signal
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_server.cli.launcher.events import (
    CoordinatorReady,
    DeadlinePassed,
    Exited,
    Finish,
    Interrupted,
    Send,
    StartProcess,
)
from ps_server.cli.launcher.supervisor import JobPlan, JobSupervisor, Stage
from ps_server.cli.launcher.times import GRACE_SECONDS, SERVER_GRACE_SECONDS
from tests.cli.launcher.supervised_job import COORDINATOR, EVALUATOR, SHARD, WORKERS, Job


def test_only_the_coordinator_is_started_before_its_address_is_known():
    job = Job(evaluators=1)
    assert job.started == [StartProcess(COORDINATOR)]
    assert job.see(CoordinatorReady()) == [
        StartProcess(SHARD),
        StartProcess(WORKERS[0]),
        StartProcess(WORKERS[1]),
        StartProcess(EVALUATOR),
    ]


def test_a_job_whose_workers_succeed_stops_shards_then_the_coordinator_and_ends_with_0():
    job = Job().ready()
    assert job.exits(WORKERS[0]) == []
    assert job.exits(WORKERS[1]) == [Send(SHARD, signal.SIGTERM)]
    assert job.exits(SHARD, -signal.SIGTERM) == [Send(COORDINATOR, signal.SIGTERM)]
    assert job.exits(COORDINATOR) == [Finish(0)]
    assert job.said == []


@pytest.mark.parametrize(
    ("end", "how", "code"), [(3, "exited with code 3", 3), (-11, "was killed by signal 11 (SIGSEGV)", 139)]
)
def test_a_failed_worker_ends_the_job_with_its_code(end, how, code):
    job = Job().ready()
    assert job.exits(WORKERS[1], end) == [Send(WORKERS[0], signal.SIGTERM)]
    assert job.said == [f"worker 1 {how}; stopping the job"]
    job.exits(WORKERS[0], 9)
    assert job.exits(SHARD) == [Send(COORDINATOR, signal.SIGTERM)]
    assert job.exits(COORDINATOR) == [Finish(code)]


def test_a_worker_that_was_killed_outright_is_told_with_its_peak_of_memory():
    job = Job(workers=1).ready()
    job.see(Exited(WORKERS[0], -signal.SIGKILL, 3_210_000_000))
    how = "worker 0 was killed by signal 9 (SIGKILL: perhaps out of memory, its peak was 3.21 GB)"
    assert job.said == [f"{how}; stopping the job"]
    assert job.supervisor.failures == [how]


def test_failures_are_kept_for_the_end_and_ends_that_were_asked_for_are_none():
    job = Job(worker_restarts=1).ready()
    job.exits(WORKERS[0], 1)
    job.exits(WORKERS[0])
    job.exits(WORKERS[1], 3)
    job.exits(SHARD, -signal.SIGTERM)
    assert job.supervisor.failures == ["worker 0 exited with code 1", "worker 1 exited with code 3"]


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace():
    job = Job().ready()
    job.exits(WORKERS[1], 1)
    assert job.supervisor.deadline == job.now + GRACE_SECONDS
    assert job.late() == [Send(WORKERS[0], signal.SIGKILL)]
    assert job.exits(WORKERS[0], -signal.SIGKILL) == [Send(SHARD, signal.SIGTERM)]


def test_failed_workers_are_started_again_until_the_restarts_are_spent():
    job = Job(worker_restarts=2).ready()
    assert job.exits(WORKERS[0], 1) == [StartProcess(WORKERS[0])]
    assert job.exits(WORKERS[1], -9) == [StartProcess(WORKERS[1])]
    assert job.exits(WORKERS[0], 4) == [Send(WORKERS[1], signal.SIGTERM)]
    assert job.said == [
        "worker 0 exited with code 1; starting it again (restart 1 of 2)",
        "worker 1 was killed by signal 9 (SIGKILL); starting it again (restart 2 of 2)",
        "worker 0 exited with code 4, and --restart-workers 2 is used up; stopping the job",
    ]


def test_a_worker_that_fails_at_once_again_and_again_is_waited_for_and_the_job_goes_on_meanwhile():
    job = Job(workers=1, worker_restarts=3).ready()
    assert job.exits(WORKERS[0], 1) == [StartProcess(WORKERS[0])]
    assert job.exits(WORKERS[0], 1) == []
    assert job.supervisor.stage is Stage.RUNNING
    assert job.late() == [StartProcess(WORKERS[0])]
    assert job.exits(WORKERS[0], 0) == [Send(SHARD, signal.SIGTERM)]
    job.exits(SHARD)
    assert job.exits(COORDINATOR) == [Finish(0)]


@pytest.mark.parametrize(("server", "code"), [(SHARD, -9), (SHARD, 0), (SHARD, 1), (COORDINATOR, -9)])
def test_a_server_that_ends_early_is_started_again_and_nobody_else_is_touched(server, code):
    job = Job(server_restarts=2).ready()
    job.now += 100
    assert job.exits(server, code) == [StartProcess(server)]
    assert job.exits(server, -9) == [StartProcess(server)]
    assert job.said[1] == f"{server} was killed by signal 9 (SIGKILL); starting it again (restart 2 of 2)"
    assert job.supervisor.stage is Stage.RUNNING


def test_servers_share_their_restarts_and_after_the_last_the_job_ends_as_it_would_without():
    job = Job(workers=1, server_restarts=2).ready()
    job.exits(SHARD, -9)
    job.exits(COORDINATOR, -9)
    assert job.exits(SHARD, -9) == [Send(WORKERS[0], signal.SIGTERM)]
    assert job.said[2] == (
        "shard 0 was killed by signal 9 (SIGKILL) before the job was done, and --restart-servers 2 is used up; "
        "stopping the job"
    )
    job.exits(WORKERS[0], -signal.SIGTERM)
    assert job.exits(COORDINATOR) == [Finish(137)]


def test_a_server_that_dies_at_once_every_time_is_started_ever_later():
    job = Job(server_restarts=4).ready()
    born = [job.now]
    for _ in range(4):
        if not job.exits(SHARD, -11):
            assert job.late() == [StartProcess(SHARD)]
        born.append(job.now)
    assert [later - sooner for sooner, later in pairwise(born)] == [0.0, 0.5, 1.0, 2.0]
    assert job.said[-1].endswith("starting it again in 2 s (restart 4 of 4)")


@pytest.mark.parametrize(("server", "code"), [(SHARD, 2), (COORDINATOR, 1)])
def test_a_server_that_refuses_its_first_start_is_not_started_again(server, code):
    job = Job(workers=1, server_restarts=5)
    if server is SHARD:
        job.ready()
    job.exits(server, code)
    assert job.said == [f"{server} exited with code {code} before the job was done; stopping the job"]


def test_a_coordinator_killed_before_it_was_ready_is_started_again():
    job = Job(server_restarts=1)
    assert job.exits(COORDINATOR, -9) == [StartProcess(COORDINATOR)]
    assert job.late() == []
    assert job.late() == [Send(COORDINATOR, signal.SIGTERM)]


def test_a_server_that_pauses_when_the_job_ends_stays_away():
    job = Job(workers=1, server_restarts=5).ready()
    job.exits(SHARD, -9)
    assert job.exits(SHARD, -9) == []
    assert job.exits(WORKERS[0]) == [Send(COORDINATOR, signal.SIGTERM)]
    assert job.exits(COORDINATOR) == [Finish(0)]


def test_a_server_that_ends_while_the_job_ends_is_not_started_again():
    job = Job(workers=1, server_restarts=5).ready()
    job.see(Interrupted(signal.SIGTERM))
    assert job.exits(SHARD, -9) == []


def test_servers_that_do_not_end_in_their_time_are_killed_and_named():
    job = Job(workers=1).ready()
    job.exits(WORKERS[0])
    assert job.supervisor.deadline == job.now + SERVER_GRACE_SECONDS
    assert job.late() == [Send(COORDINATOR, signal.SIGKILL), Send(SHARD, signal.SIGKILL)]
    assert job.said == ["coordinator, shard 0: not ended in time; killed"]
    assert job.exits(SHARD, -9) == [Send(COORDINATOR, signal.SIGTERM)]
    assert job.supervisor.deadline == job.now + SERVER_GRACE_SECONDS


@pytest.mark.parametrize(("server", "code", "ends_with"), [(SHARD, -9, 137), (COORDINATOR, 2, 2), (SHARD, 0, 1)])
def test_a_server_that_ends_early_ends_the_job_and_is_named(server, code, ends_with):
    job = Job(workers=1).ready()
    assert job.exits(server, code) == [Send(WORKERS[0], signal.SIGTERM)]
    assert str(server) in job.said[0]
    job.exits(WORKERS[0], -signal.SIGTERM)
    other = SHARD if server is COORDINATOR else COORDINATOR
    assert job.exits(other) == [Finish(ends_with)]


def test_a_coordinator_that_cannot_start_ends_the_job_before_anything_else_starts():
    job = Job()
    assert job.exits(COORDINATOR, 2) == [Finish(2)]
    assert job.said == ["coordinator exited with code 2 before the job was done; stopping the job"]


def test_a_coordinator_that_never_gets_ready_is_given_up():
    job = Job()
    assert job.late() == []
    assert job.said == ["the coordinator does not serve after 30 s; waiting for it, 300 s at most"]
    assert job.late() == [Send(COORDINATOR, signal.SIGTERM)]
    assert job.now == 400.0
    assert job.exits(COORDINATOR, -15) == [Finish(1)]


def test_evaluators_may_finish_after_the_workers():
    job = Job(workers=1, evaluators=1).ready()
    assert job.exits(WORKERS[0]) == []
    assert job.supervisor.stage is Stage.EVALUATING
    assert job.exits(EVALUATOR) == [Send(SHARD, signal.SIGTERM)]


def test_an_evaluator_that_does_not_finish_is_stopped_and_the_job_still_succeeds():
    job = Job(workers=1, evaluators=1).ready()
    job.exits(WORKERS[0])
    assert job.late() == [Send(EVALUATOR, signal.SIGTERM)]
    assert job.late() == [Send(EVALUATOR, signal.SIGKILL)]
    job.exits(EVALUATOR, -9)
    job.exits(SHARD)
    assert job.exits(COORDINATOR) == [Finish(0)]


def test_a_failed_evaluator_is_told_of_and_training_goes_on():
    job = Job(evaluators=1).ready()
    assert job.exits(EVALUATOR, 1) == []
    assert job.said == ["evaluator 0 exited with code 1; training continues without it"]
    assert job.supervisor.stage is Stage.RUNNING


def test_the_first_ctrl_c_reaches_scripts_only_and_servers_survive_until_they_have_left():
    job = Job(evaluators=1).ready()
    assert job.see(Interrupted(signal.SIGINT)) == [Send(p, signal.SIGINT) for p in (EVALUATOR, *WORKERS)]
    job.exits(WORKERS[0], -signal.SIGINT)
    job.exits(EVALUATOR, 1)
    assert job.exits(WORKERS[1], 1) == [Send(SHARD, signal.SIGTERM)]
    job.exits(SHARD)
    assert job.exits(COORDINATOR) == [Finish(130)]


def test_the_second_ctrl_c_kills_everything():
    job = Job(workers=1).ready()
    job.see(Interrupted(signal.SIGINT))
    assert job.see(Interrupted(signal.SIGINT)) == [Send(p, signal.SIGKILL) for p in (COORDINATOR, SHARD, WORKERS[0])]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_stop_ends_the_job_in_order_and_its_repetition_changes_nothing(signum, code):
    job = Job(workers=1).ready()
    assert job.see(Interrupted(signum)) == [Send(WORKERS[0], signal.SIGTERM)]
    assert job.see(Interrupted(signum)) == []
    job.exits(WORKERS[0], -signum)
    job.exits(SHARD)
    assert job.exits(COORDINATOR) == [Finish(code)]


def test_an_interrupt_before_the_coordinator_is_ready_starts_nothing_more():
    job = Job()
    assert job.see(Interrupted(signal.SIGINT)) == [Send(COORDINATOR, signal.SIGTERM)]
    assert job.see(CoordinatorReady()) == []
    assert job.exits(COORDINATOR) == [Finish(130)]


@given(data=st.data())
def test_whatever_happens_every_job_ends_with_nothing_left_alive(data):
    plan = JobPlan(*(data.draw(st.integers(low, 2)) for low in (1, 1, 0, 0, 0)))
    supervisor, now, live, code = JobSupervisor(plan), 0.0, set(), None

    def do(commands):
        nonlocal code
        for command in commands:
            assert code is None
            match command:
                case StartProcess(process):
                    assert process not in live
                    live.add(process)
                case Send(process, _):
                    assert process in live
                case Finish(ended_with):
                    assert not live
                    code = ended_with

    do(supervisor.start(now))
    for _ in range(60):
        if code is not None:
            break
        choice = data.draw(st.sampled_from(("ready", "exit", "exit", "exit", "signal", "deadline")))
        if choice == "ready":
            do(supervisor.handle(CoordinatorReady(), now))
        elif choice == "signal":
            signum = data.draw(st.sampled_from((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)))
            do(supervisor.handle(Interrupted(signum), now))
        elif choice == "deadline" and supervisor.deadline is not None:
            now = supervisor.deadline
            do(supervisor.handle(DeadlinePassed(), now))
        elif choice == "exit" and live:
            process = data.draw(st.sampled_from(sorted(live, key=str)))
            live.discard(process)
            do(supervisor.handle(Exited(process, data.draw(st.sampled_from((0, 1, -9)))), now))
    while code is None:
        if not live:
            assert supervisor.deadline is not None
            now = max(now, supervisor.deadline)
            do(supervisor.handle(DeadlinePassed(), now))
            continue
        process = min(live, key=str)
        live.discard(process)
        do(supervisor.handle(Exited(process, 0), now))
    assert supervisor.stage is Stage.FINISHED


def test_with_checkpoints_the_coordinator_ends_before_the_shards_it_needs_for_the_last_one():
    job = Job(workers=1, saves=True).ready()
    assert job.exits(WORKERS[0]) == [Send(COORDINATOR, signal.SIGTERM)]
    assert job.supervisor.stage is Stage.SAVING
    assert job.exits(COORDINATOR) == [Send(SHARD, signal.SIGTERM)]
    assert job.exits(SHARD) == [Finish(0)]


def test_a_last_checkpoint_that_never_ends_is_given_up():
    job = Job(workers=1, saves=True).ready()
    job.exits(WORKERS[0])
    assert job.late() == [Send(COORDINATOR, signal.SIGKILL)]
    assert "no last checkpoint" in job.said[-1]
    assert job.exits(COORDINATOR, -9) == [Send(SHARD, signal.SIGTERM)]
    assert job.exits(SHARD) == [Finish(137)]
    assert job.supervisor.unsaved


def test_a_last_checkpoint_that_is_not_written_is_a_failure_of_a_job_that_went_well():
    job = Job(workers=1, saves=True).ready()
    job.exits(WORKERS[0])
    assert job.exits(COORDINATOR, 74) == [Send(SHARD, signal.SIGTERM)]
    assert job.said[-1] == "coordinator exited with code 74: the last checkpoint was not written"
    assert job.exits(SHARD) == [Finish(74)]
    assert job.supervisor.unsaved
    assert job.supervisor.failures == ["coordinator exited with code 74"]


def test_a_job_that_failed_keeps_its_exit_code_and_is_unsaved_where_its_coordinator_was_lost():
    job = Job(workers=1, saves=True).ready()
    assert job.exits(WORKERS[0], 7) == [Send(COORDINATOR, signal.SIGTERM)]
    job.exits(COORDINATOR, 74)
    assert job.exits(SHARD) == [Finish(7)]
    job = Job(workers=1, saves=True).ready()
    job.exits(COORDINATOR, -9)
    job.exits(WORKERS[0])
    assert job.exits(SHARD) == [Finish(137)]
    assert job.supervisor.unsaved
    job = Job(workers=1, saves=True).ready()
    job.exits(WORKERS[0])
    job.exits(COORDINATOR)
    job.exits(SHARD)
    assert not job.supervisor.unsaved
