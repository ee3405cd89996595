"""A real coordinator with two shards that hold no tensors, and a spare one; psctl is called on it."""

from __future__ import annotations

from contextlib import contextmanager

from click.testing import CliRunner

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import JoinRequest, Role
from ps_server.cli.psctl import main
from ps_server.coordinator.settings import ClusterSettings
from tests.coordinator.fake_shards import FakeShard
from tests.support.coordinators import running_coordinator


class FakeJob:
    """What a test of psctl needs of a job."""

    def __init__(self, coordinator, client):
        self.address = coordinator.address
        self.client = client
        self.shards = [FakeShard(number, coordinator._driver) for number in range(3)]

    def psctl(self, *arguments):
        return CliRunner().invoke(main.main, arguments, env={"PS_COORDINATOR": self.address, "COLUMNS": "120"})


@contextmanager
def running_job(kind, spec):
    """A job of this class, whose one model is ``spec``."""
    settings = ClusterSettings(expected_shards=2, lease_seconds=600)
    with running_coordinator(settings) as coordinator, CoordinatorClient(coordinator.address) as client:
        job = kind(coordinator, client)
        for shard in job.shards:
            coordinator._loop.run(shard.start(add=True))
        worker = client.join(JoinRequest(Role.WORKER), "w").member
        client.declare_model(worker, spec)
        yield job
        for shard in job.shards:
            coordinator._loop.run(shard.stop())
