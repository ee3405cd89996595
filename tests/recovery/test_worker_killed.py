"""Workers are killed: the others go on, every acknowledged push counts once, and the shards serve what they logged."""

from __future__ import annotations

import signal

import pytest

from ps_protocol.cluster.view import Role
from tests.recovery.reference import assert_each_push_was_applied_once, assert_served_is_replayed, replayed
from tests.support.length import choose, few
from tests.support.seeds import seeded
from tests.support.shards import wait_until


def test_a_worker_killed_between_steps_costs_nothing_but_itself(launch):
    cluster = launch()
    stays, killed = cluster.worker(tag=0, stays=True, steps=30), cluster.worker(1, tag=1, pauses=[5])
    killed.read("step 5")
    killed.kill()
    again = cluster.worker(1, tag=2, steps=8)
    again.read("ledger")
    stays.read("stays")
    counts = assert_served_is_replayed(cluster, stays)
    assert_each_push_was_applied_once(counts, [stays, killed, again])
    assert counts[1].sum() == 5


@pytest.mark.parametrize("point", few(["before_log", "after_log_before_apply"]))
def test_a_worker_killed_in_a_step_leaves_a_whole_push_or_none(launch, point):
    cluster, shard = (started := launch(lease_seconds=30.0)), started.shards[0]
    shard.kill()
    # Each step passes twice, with the model's push and the ledger's: here in the ledger's of step 5.
    shard.start(PS_FAILPOINTS=f"{point}=stop@10")
    killed = cluster.worker(tag=0)
    wait_until(lambda: shard.stopped)
    killed.kill()
    shard.send(signal.SIGCONT)
    again = cluster.worker(tag=1, steps=8, stays=True)
    again.read("stays")
    assert killed.drain() == -signal.SIGKILL
    counts = assert_served_is_replayed(cluster, again)
    assert_each_push_was_applied_once(counts, [killed, again])
    # It had arrived whole.
    assert counts[0].sum() == 5


def test_a_worker_killed_at_any_moment_leaves_whole_pushes_only(launch):
    chance = seeded()
    cluster = launch(2)
    workers = []
    for tag in range(4):
        workers.append(cluster.worker(tag=tag, steps=60))
        workers[-1].read(f"step {chance.randrange(2, 20)}")
        workers[-1].kill()
        workers[-1].drain()
    last = cluster.worker(tag=len(workers), steps=5, stays=True)
    last.read("stays")
    counts = assert_served_is_replayed(cluster, last, dict(enumerate(workers)))
    assert_each_push_was_applied_once(counts, [*workers, last])


def test_when_all_workers_are_killed_new_ones_go_on_from_what_the_shards_hold(launch):
    cluster = launch(2)
    killed = [cluster.worker(rank, tag=rank, pauses=[6]) for rank in range(2)]
    for worker in killed:
        worker.read("step 6")
    for worker in killed:
        worker.kill()
    held = replayed(cluster.data, 2)
    cluster.wait_for_members(Role.WORKER)
    assert replayed(cluster.data, 2) == held
    again = [cluster.worker(rank, tag=2 + rank, steps=6, stays=True) for rank in range(2)]
    assert [worker.number("started") >= 12 for worker in again] == [True, True]
    for worker in again:
        worker.read("stays")
    counts = assert_served_is_replayed(cluster, again[0])
    assert_each_push_was_applied_once(counts, [*killed, *again])


@pytest.mark.parametrize("mode", few(["sync", "async"]))
def test_a_worker_that_fails_again_and_again_holds_the_others_up_for_a_lease_at_most(launch, mode):
    cluster, meetings = launch(coordinator=["--mode", mode]), choose([2, 4, 6, 8, 10], [2, 4])
    stays = cluster.worker(tag=0, stays=True, pauses=meetings, steps=12)
    failing = []
    for tag, step in enumerate(meetings, 1):
        stays.read(f"step {step}")
        failing.append(cluster.worker(1, tag=tag, dies_after=1))
        failing[-1].read("started")
        stays.tell()
        assert failing[-1].drain() == 7
    stays.read("stays")
    counts = assert_served_is_replayed(cluster, stays)
    if mode == "async":
        assert_each_push_was_applied_once(counts, [stays, *failing])
    else:
        # Every step is an average: its parts add up to one.
        assert counts.sum() == stays.steps
        assert counts[1:, 0].tolist()[: len(meetings) + 1] == [0.5] * len(meetings) + [0.0]


def test_a_killed_worker_leaves_the_barrier_and_its_next_life_joins_at_the_present_step(launch):
    # Both begin together: one that is alone makes its steps alone.
    cluster = launch(2, coordinator=["--mode", "sync", "--workers", "2"])
    stays, killed = cluster.worker(tag=0, stays=True, pauses=[8], steps=16), cluster.worker(1, tag=1, pauses=[3])
    killed.read("step 3")
    killed.kill()
    # Nobody is waited for any more.
    stays.read("step 8")
    again = cluster.worker(1, tag=2, steps=4)
    assert again.number("started") >= 8
    stays.tell()
    again.read("ledger")
    stays.read("stays")
    counts = assert_served_is_replayed(cluster, stays)
    assert counts.sum() == counts[0].count_nonzero() == 16
    assert counts[1].count_nonzero() in (3, 4)
    assert counts[2].tolist()[:5] == [0.5, 0.5, 0.5, 0.5, 0.0]


def test_after_both_workers_were_killed_a_synchronous_job_goes_on_with_both(launch):
    cluster = launch(coordinator=["--mode", "sync", "--workers", "2"])
    killed = [cluster.worker(rank, tag=rank, pauses=[4]) for rank in range(2)]
    for worker in killed:
        worker.read("step 4")
    for worker in killed:
        worker.kill()
    cluster.wait_for_members(Role.WORKER)
    first = cluster.worker(0, tag=2, steps=6, stays=True)
    cluster.wait_for_members(Role.WORKER, 0)
    assert not cluster.status().view.started
    second = cluster.worker(1, tag=3, steps=6, stays=True)
    for worker in (first, second):
        worker.read("stays")
    assert cluster.status().view.started
    counts = assert_served_is_replayed(cluster, first)
    assert [counts[tag].tolist()[:7] for tag in (2, 3)] == [[0.5] * 6 + [0.0]] * 2
