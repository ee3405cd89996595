"""The shard is killed when it drops a released model, then the coordinator: both come back without it. About 5 s."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import ClosedModelAsk, JoinRequest, Role
from ps_protocol.errors import ModelReleased
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import DType, Variable
from tests.coordinator.cluster import SPEC
from tests.support.length import choose
from tests.support.shards import wait_until

SECOND = replace(SPEC, optimizer="torch.optim.Adam", variables=(Variable("w", (7, 3), DType.FLOAT32),))


@pytest.mark.parametrize("point", choose(["before_release_log", "after_release_log"], ["before_release_log"]))
def test_both_are_killed_and_come_back_without_the_model(launch, point):
    # The workers send no heartbeats.
    cluster = launch(start=False, lease_seconds=30.0, coordinator=["--heartbeat-seconds", "0.5"])
    shard = cluster.shards[0]
    cluster.coordinator.start()
    shard.start(PS_FAILPOINTS=f"{point}=kill@1")
    with CoordinatorClient(cluster.address) as client:

        def holds(shard_map):
            nbytes = Layout.of(shard_map, 0).region_bytes
            return any(each.stats.held_bytes == nbytes for each in client.get_status().members)

        def worker(token):
            return client.join(JoinRequest(Role.WORKER, 0, take_over=True), token, 30.0).member

        first = worker("one")
        placed = client.declare_model(first, SPEC, 30.0)
        wait_until(lambda: holds(placed))
        client.close_model(worker("two"), ClosedModelAsk("net", 1, release=True), 30.0, 30.0)
        wait_until(lambda: not shard.alive)
        cluster.coordinator.kill()
        cluster.coordinator.start()
        assert client.get_status(30.0).view.released_models == {"net": 1}
        with pytest.raises(ModelReleased):
            client.get_shard_map("net", 30.0)
        shard.start()
        cluster.wait_for_members(Role.SHARD, 0)
        again = client.declare_model(worker("three"), SECOND, 30.0)
        assert again.epoch == 2
        wait_until(lambda: holds(again))
    assert "another model under the name" not in shard.said
