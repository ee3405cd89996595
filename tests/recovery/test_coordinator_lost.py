"""The coordinator is killed, frozen and absent: training goes on, and nobody joins again when it is back."""

from __future__ import annotations

import signal

from tests.recovery.cluster import LEASE_SECONDS
from tests.recovery.reference import alone
from tests.recovery.scripts import STEPS
from tests.support.shards import wait_until

WORKER_LEAVES_SECONDS = 6.0
"""More than a process that only tries for some seconds to say that it ends."""


def last_for_two_leases():
    """The fault itself lasts so long; there is nothing to be seen meanwhile."""
    signal.sigtimedwait([], 2 * LEASE_SECONDS)


def incarnations(cluster):
    return sorted(member.incarnation for member in cluster.status().view.members)


def test_training_goes_on_while_the_coordinator_is_away_and_members_keep_their_places(launch):
    cluster = launch()
    worker = cluster.worker(pauses=[5, 15])
    worker.read("step 5")
    before = incarnations(cluster)
    cluster.coordinator.kill()
    last_for_two_leases()
    worker.tell()
    worker.read("step 15")
    cluster.coordinator.start()
    assert incarnations(cluster) == before
    worker.tell()
    assert worker.read("digest") == f"digest {alone(STEPS)}"


def test_a_shard_that_starts_while_the_coordinator_is_away_waits_for_it_and_so_does_its_worker(launch):
    cluster, shard = (started := launch()), started.shards[0]
    worker = cluster.worker(pauses=[5])
    worker.read("step 5")
    cluster.coordinator.kill()
    shard.kill()
    worker.tell()
    shard.launch()
    wait_until(lambda: "restored 1 models" in shard.said and "does not answer" in worker.said)
    assert not shard.ready_file.exists()
    cluster.coordinator.start()
    assert worker.read("digest") == f"digest {alone(STEPS)}"


def test_a_coordinator_killed_again_and_again_costs_nobody_a_place_or_a_push(launch):
    cluster = launch(lease_seconds=30.0)
    worker = cluster.worker(pauses=[4, 8, 12, 16])
    worker.read("step 4")
    before = incarnations(cluster)
    for step in (8, 12, 16):
        cluster.coordinator.kill()
        worker.tell()
        worker.read(f"step {step}")
        cluster.coordinator.start()
    assert incarnations(cluster) == before
    worker.tell()
    assert worker.read("digest") == f"digest {alone(STEPS)}"


def test_a_coordinator_frozen_for_longer_than_a_lease_takes_nobody_for_dead(launch):
    cluster = launch()
    worker = cluster.worker(pauses=[5, 15])
    worker.read("step 5")
    before = incarnations(cluster)
    cluster.coordinator.send(signal.SIGSTOP)
    last_for_two_leases()
    worker.tell()
    worker.read("step 15")
    cluster.coordinator.send(signal.SIGCONT)
    assert incarnations(cluster) == before
    worker.tell()
    assert worker.read("digest") == f"digest {alone(STEPS)}"
    assert "lease ended" not in cluster.coordinator.said


def test_a_worker_that_finishes_while_the_coordinator_is_away_has_left_when_that_is_back(launch):
    """Others wait for one that is lost, for a lease."""
    cluster = launch(lease_seconds=60.0, coordinator=["--workers", "2", "--mode", "ssp", "--staleness", "0"])
    first = cluster.worker(0, tag=0, steps=4, pauses=[4])
    second = cluster.worker(1, tag=1, steps=12)
    first.read("step 4")
    cluster.coordinator.kill()
    first.tell()
    wait_until(lambda: "worker 0 has finished, and waits up to" in first.said)
    signal.sigtimedwait([], WORKER_LEAVES_SECONDS)
    cluster.coordinator.start()
    assert first.drain() == 0
    assert {member.member.index: member.gone for member in cluster.status().members if member.gone}[0] == "left"
    second.read("step 12")
    assert second.drain() == 0
