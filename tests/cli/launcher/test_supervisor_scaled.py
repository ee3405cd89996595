"""What ps-run starts and ends when the coordinator tells it how many workers and shards are to run."""

from __future__ import annotations

import signal
from typing import Any

from ps_protocol.cluster.scaling import ScaleOrder
from ps_server.cli.launcher.events import (
    CannotAsk,
    CoordinatorReady,
    DeadlinePassed,
    Finish,
    Interrupted,
    ProcessName,
    ProcessRole,
    Scaled,
    Send,
    StartProcess,
    WorkersWanted,
)
from ps_server.cli.launcher.supervisor import Stage
from ps_server.cli.launcher.times import SERVER_GRACE_SECONDS
from tests.cli.launcher.supervised_job import COORDINATOR, SHARD, WORKERS, Job

WORKER = [ProcessName(ProcessRole.WORKER, rank) for rank in range(8)]
SHARDS = [ProcessName(ProcessRole.SHARD, number) for number in range(4)]


def order(number: int = 1, ranks: Any = None, **others: Any) -> Scaled:
    fields = {name: frozenset(value) if isinstance(value, set) else value for name, value in others.items()}
    return Scaled(ScaleOrder(number, None if ranks is None else frozenset(ranks), **fields))


def job(**plan: Any) -> Job:
    return Job(**{"workers": 2, "elastic": True, **plan}).ready()


def test_workers_are_started_once_and_those_that_came_by_hand_are_not():
    j = job()
    assert j.see(order(1, {0, 1, 2, 3}, live_ranks={0, 3})) == [StartProcess(WORKER[2])]
    assert j.see(order(1, {0, 1, 2, 3}, live_ranks={0, 3})) == []
    assert j.said == ["worker 2 is started: the job is to have more"]


def test_one_that_is_ended_did_not_fail_is_not_started_again_and_the_job_trains_on():
    j = job(workers=3, worker_restarts=5)
    assert j.see(order(1, {0, 1})) == [Send(WORKER[2], signal.SIGTERM)]
    assert j.see(order(1, {0, 1})) == []
    assert j.exits(WORKER[2], 143) == []
    assert j.supervisor.failures == []
    assert j.see(order(1, {0, 1})) == []
    assert j.exits(WORKER[0], 1) == [StartProcess(WORKER[0])]
    assert j.see(order(2, {0, 1, 2})) == [StartProcess(WORKER[2])]


def test_one_that_has_left_after_training_is_left_alone_while_it_saves_and_its_exit_code_counts():
    j = job(workers=3)
    assert j.see(order(1, {1}, done_ranks={0})) == [Send(WORKER[2], signal.SIGTERM)]
    assert j.exits(WORKER[2], 143) == []
    assert j.exits(WORKER[0], 1) != []
    assert j.supervisor.failures


def test_one_that_does_not_end_in_time_is_killed():
    j = job()
    j.see(order(1, {0}))
    j.now += SERVER_GRACE_SECONDS
    assert j.see(DeadlinePassed()) == [Send(WORKER[1], signal.SIGKILL)]
    assert j.see(DeadlinePassed()) == []
    assert j.exits(WORKER[1], -9) == []


def test_one_that_is_wanted_again_while_it_ends_comes_back_after_its_end():
    j = job()
    j.see(order(1, {0}))
    assert j.see(order(2, {0, 1})) == []
    assert j.exits(WORKER[1], 143) == []
    assert j.see(order(2, {0, 1})) == [StartProcess(WORKER[1])]


def test_a_restart_that_is_due_is_dropped_when_the_worker_is_not_wanted():
    j = job(worker_restarts=9)
    for _ in range(3):
        j.exits(WORKER[1], 1)
    assert j.supervisor.deadline is not None
    j.see(order(1, {0}))
    assert j.supervisor.deadline is None


def test_the_job_ends_when_all_have_left_after_training():
    j = job()
    assert j.exits(WORKER[0]) == j.exits(WORKER[1]) == []
    # What was told before the end of a worker says nothing; one that joined by hand trains on.
    assert j.see(order(0, live_ranks={5})) == []
    assert j.supervisor.stage is Stage.RUNNING
    assert j.see(order(0, finished=True)) == [Send(SHARD, signal.SIGTERM)]


def test_workers_whose_script_never_connects_end_the_job_too():
    j = job()
    j.exits(WORKER[0])
    j.exits(WORKER[1])
    assert j.see(order(0)) == [Send(SHARD, signal.SIGTERM)]


def test_one_that_has_trained_to_the_end_is_not_started_again_unless_the_job_is_scaled_again():
    j = job()
    j.see(order(1, {0, 1}))
    j.exits(WORKER[1])
    assert j.see(order(1, {0, 1}, live_ranks={0})) == []
    assert j.see(order(2, {0, 1}, live_ranks={0})) == [StartProcess(WORKER[1])]


def test_without_workers_it_serves_until_those_that_joined_by_hand_have_left_or_it_is_interrupted():
    j = job(workers=0)
    assert j.see(order(0)) == j.see(order(0, live_ranks={0})) == []
    assert j.see(order(0, finished=True)) == [Send(SHARD, signal.SIGTERM)]
    other = job(workers=0)
    assert other.see(Interrupted(signal.SIGINT)) == [Send(SHARD, signal.SIGTERM)]
    other.exits(SHARD)
    assert other.exits(COORDINATOR)[-1] == Finish(130)


def test_all_workers_may_be_ended_and_others_come_later():
    j = job()
    j.see(order(1, set()))
    for worker in WORKERS:
        assert j.exits(worker, 143) == []
    assert j.see(order(1, set())) == []
    assert j.see(order(2, {0})) == [StartProcess(WORKER[0])]


def test_shards_are_started_where_asked_for_and_ended_once_they_may():
    j = job()
    # Shard 3 came by hand, and was lost: another one in its place would have nothing.
    more = order(1, shards={0, 1, 3}, added_shards={1}, live_shards={0})
    assert j.see(more) == [StartProcess(SHARDS[1])]
    assert j.see(more) == []
    assert j.see(order(2, shards={0}, live_shards={0, 1})) == [Send(SHARDS[1], signal.SIGTERM)]
    assert j.exits(SHARDS[1]) == []
    assert j.supervisor.failures == []
    # The loss of another one is still a loss.
    assert j.exits(SHARDS[0])[0] == Send(WORKER[0], signal.SIGTERM)


def test_a_shard_that_was_added_is_restarted_like_the_others():
    j = job(server_restarts=3)
    j.see(order(1, shards={0, 1}, added_shards={1}, live_shards={0}))
    assert j.exits(SHARDS[1], -9) == [StartProcess(SHARDS[1])]


def test_a_job_that_goes_on_begins_with_what_it_had():
    j = Job(shards=1, workers=2, elastic=True)
    j.see(order(4, {0, 1, 2}, shards={0, 1}))
    started = j.see(order(4, {0, 1, 2}, shards={0, 1}))
    assert started == []
    assert j.see(CoordinatorReady()) == [StartProcess(each) for each in (*SHARDS[:2], *WORKER[:3])]


def test_where_the_coordinator_cannot_be_asked_the_job_ends_with_its_own_workers():
    j = job()
    assert j.see(CannotAsk()) == []
    j.exits(WORKER[0])
    assert j.exits(WORKER[1]) == [Send(SHARD, signal.SIGTERM)]
    late = job()
    late.exits(WORKER[0])
    late.exits(WORKER[1])
    assert late.see(CannotAsk()) == [Send(SHARD, signal.SIGTERM)]


def test_nothing_is_started_while_the_job_ends():
    j = job()
    j.see(Interrupted(signal.SIGTERM))
    assert j.see(order(1, {0, 1, 2, 3}, shards={0, 1}, added_shards={1})) == []


def test_a_worker_that_hangs_without_restarts_is_told_with_the_remedy():
    j = job()
    assert j.see(WorkersWanted((1,))) == []
    assert j.said == ["worker 1 is lost to the coordinator, and without --restart-workers it is not started again"]
