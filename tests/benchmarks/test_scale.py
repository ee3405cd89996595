"""The members of the scale program see a change, its streams make steps. In this process; under 1 s of CPU."""

import time

import pytest

from benchmarks.scale.members import members
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import Role
from ps_protocol.model.spec import Consistency, Mode
from ps_server.coordinator.settings import ClusterSettings
from tests.support.coordinators import running_coordinator
from tests.support.shards import wait_until

COUNT = 8


def test_all_members_join_and_tell_when_they_saw_a_change():
    with (
        running_coordinator(ClusterSettings(expected_workers=0, lease_seconds=600)) as coordinator,
        CoordinatorClient(coordinator.address) as client,
        members(coordinator.address, 1, 0, 0.05, True),
        members(coordinator.address, COUNT, 0, 0.05, False) as workers,
    ):
        wait_until(lambda: len(client.get_status().view.live(Role.WORKER)) == COUNT)
        changed = time.monotonic()
        revision = client.set_consistency(Consistency(Mode.SSP, 3)).revision
        seen = workers.wait(revision, 60.0)
        assert len(seen) == COUNT
        assert min(seen) >= changed
        wait_until(
            lambda: all(each.stats.steps for each in client.get_status().members if each.member.role is Role.WORKER)
        )
        with pytest.raises(RuntimeError, match=f"revision {revision + 100} has not reached all members"):
            workers.wait(revision + 100, 0.1)
    assert workers._loop.is_closed()
