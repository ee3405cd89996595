"""psctl scale over a real coordinator, with a thread in the place of the program that starts the processes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.client.worker_requests import WorkerRequests
from ps_protocol.cluster.view import JoinRequest, Member, Role
from ps_server.cli.psctl import main
from ps_server.coordinator.settings import ClusterSettings
from tests.support.coordinators import TestCoordinator, running_coordinator

SETTINGS = ClusterSettings(least_workers=1, most_workers=4, lease_seconds=600)


class Launcher(threading.Thread):
    """Has the workers join and leave that are told."""

    def __init__(self, client: CoordinatorClient) -> None:
        super().__init__(daemon=True)
        self._client = client
        self._requests = WorkerRequests(client.address, interval_seconds=0.05)
        self._closed = threading.Event()
        self.workers: dict[int, Member] = {}

    def join_worker(self, rank: int) -> None:
        self.workers[rank] = self._client.join(JoinRequest(Role.WORKER, rank), f"worker {rank}").member

    def run(self) -> None:
        while not self._closed.wait(0.01):
            order = self._requests.take().order
            if order is None or order.ranks is None:
                continue
            for rank in order.ranks - self.workers.keys():
                self.join_worker(rank)
            for rank in self.workers.keys() - order.ranks:
                self._client.leave(self.workers.pop(rank), "Terminated")

    def close(self) -> None:
        self._closed.set()
        self.join()
        self._requests.close()


@contextmanager
def running(coordinator: TestCoordinator) -> Iterator[CoordinatorClient]:
    with CoordinatorClient(coordinator.address) as client:
        launcher = Launcher(client)
        client.join(JoinRequest(Role.SHARD, 0, "127.0.0.1:1"), "shard")
        launcher.join_worker(0)
        launcher.start()
        try:
            yield client
        finally:
            launcher.close()


@pytest.fixture
def client():
    with running_coordinator(SETTINGS) as coordinator, running(coordinator) as client:
        yield client


def psctl(client, *arguments):
    return CliRunner().invoke(main.main, ["--coordinator", client.address, *arguments])


def test_workers_are_started_and_ended_and_what_is_waited_for_is_said(client):
    done = psctl(client, "scale", "--workers", "3")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0] == "workers 1 and 2 have to join"
    assert lines[-1] == "the job has 3 workers and 1 shard"
    done = psctl(client, "scale", "--workers", "2", "--json")
    assert json.loads(done.stdout) == {"workers": 2, "shards": 1}
    assert done.stderr == "worker 2 has to end\n"
    # The same again is done at once.
    again = psctl(client, "scale", "--workers", "2", "--timeout", "0")
    assert (again.exit_code, again.output) == (0, "the job has 2 workers and 1 shard\n")
    status = json.loads(psctl(client, "status", "--json", "--check").stdout)
    assert status["view"]["wanted_workers"] == 2
    assert psctl(client, "status", "--check").exit_code == 0


def test_what_was_asked_for_stays_wanted_after_the_timeout(client):
    # Nobody adds a shard here.
    done = psctl(client, "scale", "--shards", "2", "--timeout", "0.2")
    assert done.exit_code == 1
    assert "not scaled after 0.2 s: shard 1 has to start; remedy: it stays wanted" in done.output
    assert client.get_status().view.wanted_shards == 2
    assert client.get_order().added_shards == {1}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--workers", "5"], "this job cannot have 5 workers; expected: 1 to 4"),
        (["--workers", "0"], "this job cannot have 0 workers; expected: 1 to 4"),
    ],
)
def test_what_the_job_cannot_have_is_an_error(client, arguments, text):
    done = psctl(client, "scale", *arguments)
    assert done.exit_code == 1
    assert text in done.output
    assert client.get_status().view.wanted_workers is None


def test_a_command_without_numbers_is_a_usage_error(client):
    assert psctl(client, "scale").exit_code == 2


def test_a_coordinator_that_is_lost_meanwhile_is_asked_again(tmp_path):
    with running_coordinator(SETTINGS, tmp_path) as coordinator, running(coordinator) as client:
        done = threading.Thread(target=lambda: told.append(psctl(client, "scale", "--shards", "2")))
        told: list = []
        done.start()
        while client.get_status().view.wanted_shards is None:
            threading.Event().wait(0.01)
        coordinator.stop()
        coordinator.start()
        coordinator.stop()
        coordinator.start()
        client.join(JoinRequest(Role.SHARD, 1, "127.0.0.1:2", add=True), "another shard")
        client.move((1,), ())
        for _ in client.move((1,), ()):
            pass
        done.join(60.0)
        assert told[0].exit_code == 0, told[0].output
        assert told[0].output.splitlines()[-1] == "the job has 1 worker and 2 shards"
