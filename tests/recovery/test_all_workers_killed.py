"""All workers of a fixed number are killed: the first that returns waits for the others, and steps have them all."""

from __future__ import annotations

from ps_protocol.cluster.view import Role
from tests.recovery.reference import assert_served_is_replayed


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
