"""Each pair of roles is parted by a proxy between them: silent, cut, and healed."""

from __future__ import annotations

import re

import pytest

from chaos.proxy import Proxy
from ps_protocol.cluster.view import Role
from ps_protocol.launch.ports import free_port
from tests.recovery.cluster import LOST, joins_and_leaves
from tests.recovery.reference import alone, assert_each_push_was_applied_once, assert_served_is_replayed
from tests.recovery.scripts import STEPS
from tests.support.seeds import seeded
from tests.support.shards import wait_until


@pytest.fixture
def between(request):
    """``between(address)``: a proxy in front of it."""

    def between(target):
        proxy = Proxy(target)
        request.addfinalizer(proxy.close)
        return proxy

    return between


def test_a_worker_parted_from_a_shard_again_and_again_repeats_what_was_not_answered(launch, between):
    chance = seeded()
    port = str(free_port())
    address = f"127.0.0.1:{port}"
    proxy = between(address)
    # No side channel would pass the proxy.
    cluster = launch(shard=["--port", port, "--advertise", proxy.address])
    steps = sorted(chance.sample(range(1, STEPS - 1), 3))
    worker = cluster.worker(transport="grpc", tag=0, stays=True, pauses=steps)
    for step in steps:
        worker.read(f"step {step}")
        proxy.hush()
        worker.tell()
        proxy.cut()
        wait_until(lambda: "does not answer" in worker.said)
        proxy.heal()
    worker.read("stays")
    assert_each_push_was_applied_once(assert_served_is_replayed(cluster, worker), [worker])
    assert f"digest {alone(STEPS)}" in worker.lines[-2:]


def test_a_worker_parted_from_the_coordinator_loses_its_place_and_the_others_train_on(launch, between):
    cluster = launch(2)
    proxy = between(cluster.address)
    parted = cluster.worker(1, coordinator=proxy.address, tag=1, pauses=[4])
    stays = cluster.worker(0, tag=0, stays=True)
    parted.read("step 4")
    proxy.cut()
    cluster.wait_for_members(Role.WORKER, 0)
    joined = joins_and_leaves(cluster)
    # It still reaches the shards, which know that it lost its place.
    parted.tell()
    assert parted.drain() == 1
    assert "Fenced" in parted.said
    stays.read("stays")
    counts = assert_served_is_replayed(cluster, stays)
    assert_each_push_was_applied_once(counts, [stays, parted, joined])
    assert counts[1].sum() == 4


def test_a_shard_parted_from_the_coordinator_serves_on_until_it_hears_that_it_lost_its_place(launch, between):
    cluster = launch(start=False)
    cluster.coordinator.start()
    proxy = between(cluster.address)
    shard = cluster.shard(0, coordinator=proxy.address)
    cluster.shards = [shard]
    shard.start()
    worker = cluster.worker(pauses=[5, 15])
    worker.read("step 5")
    proxy.cut()
    cluster.wait_for_members(Role.SHARD)
    worker.tell()
    worker.read("step 15")
    proxy.heal()
    assert shard.wait() == 1
    # A heartbeat that was on its way may come after the end of its connection.
    assert re.search(LOST, shard.said)
    shard.start()
    worker.tell()
    assert worker.read("digest") == f"digest {alone(STEPS)}"


def test_a_silent_network_between_all_roles_delays_training_and_changes_nothing(launch, between):
    cluster = launch(start=False, lease_seconds=5.0)
    cluster.coordinator.start()
    port = str(free_port())
    address = f"127.0.0.1:{port}"
    to_coordinator, to_shard = between(cluster.address), between(address)
    shard = cluster.shard(0, "--port", port, "--advertise", to_shard.address, coordinator=to_coordinator.address)
    cluster.shards = [shard]
    shard.start()
    worker = cluster.worker(coordinator=to_coordinator.address, transport="grpc", pauses=[5, 10])
    for step in (5, 10):
        worker.read(f"step {step}")
        to_coordinator.hush()
        to_shard.hush()
        worker.tell()
        to_shard.heal()
        to_coordinator.heal()
    assert worker.read("digest") == f"digest {alone(STEPS)}"
