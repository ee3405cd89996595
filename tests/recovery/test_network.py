"""Each link between two roles is cut on a network where packets just vanish, and then heals."""

from __future__ import annotations

import re
import signal

import pytest

from tests.recovery.cluster import LEASE_SECONDS, LOST
from tests.recovery.network import Network, why_no_network
from tests.recovery.reference import alone
from tests.recovery.scripts import STEPS
from tests.support.shards import wait_until


@pytest.fixture
def network():
    if reason := why_no_network():
        pytest.skip(reason)
    made = Network()
    yield made
    made.close()


@pytest.mark.early
def test_a_process_that_is_cut_off_goes_on_or_is_fenced_and_training_ends_with_the_bits_of_an_undisturbed_run(
    network, launch
):
    cluster = launch(start=False)
    coordinator = f"{network.address('coordinator')}:{cluster.address.rpartition(':')[2]}"
    cluster.coordinator.arguments = [
        *cluster.coordinator.arguments,
        "--insecure",
        "--bind",
        network.address("coordinator"),
    ]
    cluster.coordinator.start(**network.inside("coordinator"))
    shard = cluster.shard(0, "--insecure", "--bind", network.address("shard"), coordinator=coordinator)
    shard.start(**network.inside("shard"))

    def worker(host="worker", **options):
        return cluster.worker(coordinator=coordinator, transport="bulk", inside=network.inside(host), **options)

    first = worker(pauses=[4, 8, 12, 16])
    first.read("step 4")
    network.cut("worker", "shard")
    first.tell()
    # Nothing is heard of it for this long.
    signal.sigtimedwait([], LEASE_SECONDS / 2)
    assert first.steps == 4
    network.heal("worker", "shard")
    first.read("step 8")

    network.cut("shard", "coordinator")
    wait_until(lambda: "lease ended: shard 0" in cluster.coordinator.said)
    first.tell()
    first.read("step 12")
    network.heal("shard", "coordinator")
    assert shard.wait() == 1
    assert re.search(LOST, shard.said)
    shard.start(**network.inside("shard"))
    first.tell()
    first.read("step 16")

    network.cut("worker", "coordinator")
    wait_until(lambda: "lease ended: worker 0" in cluster.coordinator.said)
    # Its successor is on the shard's host. The shard admits it only with a view in which the first is no member.
    second = worker(host="shard")
    assert second.number("started") == first.steps
    first.tell()
    assert first.drain() == 1
    assert "Fenced" in first.said
    assert second.read("digest") == f"digest {alone(STEPS)}"
