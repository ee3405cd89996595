"""psctl wait and status --check: states and health as exit codes."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from click.testing import CliRunner

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import JoinRequest, Role
from ps_protocol.launch.ports import free_port
from ps_server.cli.psctl import main, wait
from ps_server.coordinator.settings import ClusterSettings
from tests.support.coordinators import running_coordinator, stopped_coordinator
from tests.support.shards import wait_until


@dataclass
class Address:
    """Where a coordinator is, or will be."""

    address: str


@pytest.fixture
def client():
    settings = ClusterSettings(expected_workers=2, lease_seconds=600)
    with running_coordinator(settings) as coordinator, CoordinatorClient(coordinator.address) as client:
        yield client


def join(client, role, index):
    address = "127.0.0.1:1" if role is Role.SHARD else ""
    return client.join(JoinRequest(role, index, address), f"{role} {index}").member


def psctl_says(client, *arguments):
    done = CliRunner().invoke(main.main, ["--coordinator", client.address, *arguments])
    return done.exit_code, done.output


def test_each_state_is_waited_for_and_what_cannot_come_ends_the_wait(client):
    code, said = psctl_says(client, "wait", "--for", "training", "--timeout", "0")
    assert (code, said[:25]) == (1, "not 'training' after 0 s:")
    join(client, Role.SHARD, 0)
    workers = [join(client, Role.WORKER, 0)]
    assert psctl_says(client, "wait", "--for", "1-worker") == (0, "")
    assert psctl_says(client, "wait", "--for", "2-workers", "--timeout", "0")[0] == 1
    workers.append(join(client, Role.WORKER, 1))
    assert psctl_says(client, "wait", "--for", "2-workers") == (0, "")
    assert psctl_says(client, "wait", "--for", "training") == (0, "")
    assert psctl_says(client, "wait", "--for", "finished", "--timeout", "0")[0] == 1
    for worker in workers:
        client.leave(worker)
    assert psctl_says(client, "wait", "--for", "finished") == (0, "")
    code, said = psctl_says(client, "wait", "--for", "training")
    assert code == 1
    assert "and the job has finished" in said


@pytest.fixture
def said(monkeypatch):
    """What psctl wait has told of its waiting."""
    lines = []
    monkeypatch.setattr(wait, "note", lambda text, level=0: lines.append(text))
    return lines


def test_a_coordinator_that_is_not_up_yet_is_waited_for(said):
    with stopped_coordinator(ClusterSettings(lease_seconds=600)) as coordinator, ThreadPoolExecutor(1) as threads:
        coordinator.port = free_port()
        address = f"127.0.0.1:{coordinator.port}"
        waiting = threads.submit(psctl_says, Address(address), "wait", "--for", "1-worker", "--timeout", "90")
        wait_until(lambda: said)
        assert said[0].startswith(f"waiting for the coordinator at {address} since ")
        coordinator.start()
        with CoordinatorClient(address) as client:
            join(client, Role.SHARD, 0)
            join(client, Role.WORKER, 0)
        assert waiting.result(90) == (0, "")
    assert len(said) == 1


def test_a_coordinator_that_is_started_again_is_waited_for(said, tmp_path):
    settings = ClusterSettings(lease_seconds=600)
    with running_coordinator(settings, tmp_path) as coordinator, ThreadPoolExecutor(1) as threads:
        address = coordinator.address
        waiting = threads.submit(psctl_says, Address(address), "wait", "--for", "1-worker", "--timeout", "90")
        coordinator.stop()
        wait_until(lambda: said)
        coordinator.start()
        with CoordinatorClient(address) as client:
            join(client, Role.WORKER, 0)
        assert waiting.result(90) == (0, "")


@pytest.mark.parametrize("timeout", ["0", "0.2"])
def test_a_coordinator_that_never_comes_ends_the_wait_at_its_timeout(said, timeout):
    address = f"127.0.0.1:{free_port()}"
    code, told = psctl_says(Address(address), "wait", "--for", "training", "--timeout", timeout)
    assert code == 1
    assert told.startswith(f"Error: the coordinator at {address} ")


def test_what_is_no_state_is_a_usage_error(client):
    code, said = psctl_says(client, "wait", "--for", "happy")
    assert code == 2
    assert "'happy' is not a state" in said


def test_the_health_of_a_job_is_an_exit_code(client):
    code, said = psctl_says(client, "status", "--check")
    assert code == 3
    assert "shard 0 is missing" in said
    assert "0 of 2 workers live" in said
    join(client, Role.SHARD, 0)
    workers = [join(client, Role.WORKER, rank) for rank in range(2)]
    assert psctl_says(client, "status", "--check")[0] == 0
    client.leave(workers[0], "RuntimeError: no")
    code, said = psctl_says(client, "status", "--check", "--json")
    assert code == 3
    assert "worker 0 failed: RuntimeError: no" in said
    join(client, Role.WORKER, 0)


def test_every_command_has_a_version():
    for command in (main.main, *(__import__(f"ps_server.{name}.main", fromlist=["main"]).main for name in MODULES)):
        done = CliRunner().invoke(command, ["--version"])
        assert done.exit_code == 0, done.output
        assert " of torch-ps 0." in done.output


MODULES = ("coordinator", "shard", "cli.launcher")
