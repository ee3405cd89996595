"""A coordinator that comes back from its journal: its members go on as if it had never been away."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.client.membership import Membership
from ps_protocol.cluster.view import JoinRequest, MemberStats, Role
from ps_protocol.errors import Fenced
from ps_protocol.launch.ports import free_port
from ps_server.coordinator.settings import ClusterSettings
from tests.support.coordinators import TestCoordinator, running_coordinator
from tests.support.length import choose

WAIT = 60.0
WORKER = JoinRequest(Role.WORKER)
SETTINGS = ClusterSettings(lease_seconds=20.0, heartbeat_seconds=0.05, seed=5)


def shard(state: int = 0) -> JoinRequest:
    return JoinRequest(Role.SHARD, 0, "127.0.0.1:1", data_incarnation=state, take_over=True)


@contextmanager
def member(address: str, spec: JoinRequest = WORKER) -> Iterator[Membership]:
    with CoordinatorClient(address) as client:
        membership = Membership.join(client, spec, WAIT)
        try:
            yield membership
        finally:
            membership.close()


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[TestCoordinator]:
    with running_coordinator(SETTINGS, tmp_path) as running:
        yield running


def start_later(coordinator: TestCoordinator) -> None:
    """As a process that is started later: its incarnations could begin anywhere."""
    coordinator.start(replace(SETTINGS, first_incarnation=1))


def wait_until_heard(client: CoordinatorClient, *members: Membership) -> None:
    """Return once the coordinator has had a heartbeat of each since it was started."""
    waiting = {m.member for m in members}
    deadline = time.monotonic() + WAIT
    while waiting:
        assert time.monotonic() < deadline, f"nothing was heard of {waiting}"
        status = client.get_status(WAIT)
        assert waiting <= set(status.view.members)
        for m in status.members:
            # Statistics come with each heartbeat and are not in the journal.
            waiting -= {m.member} if m.stats.steps else set()


def test_workers_parked_at_a_barrier_pass_it_after_the_coordinator_was_away(coordinator: TestCoordinator) -> None:
    with CoordinatorClient(coordinator.address) as client, ThreadPoolExecutor(1) as pool:
        client.join(shard(), "shard")
        a, b = (client.join(WORKER, f"worker {i}").member for i in range(2))
        parked = pool.submit(client.barrier, a, 0, 30.0)
        while a.index in client.barrier(b, 0, 0.0).missing_ranks:
            pass
        coordinator.stop()
        start_later(coordinator)
        assert client.barrier(b, 0, 30.0).released
        assert parked.result(WAIT).released


def test_announcing_waits_for_a_coordinator_that_is_away(coordinator: TestCoordinator) -> None:
    with member(coordinator.address, shard()) as primary, ThreadPoolExecutor(1) as pool:
        coordinator.stop()
        announced = pool.submit(primary.announce_state, WAIT)
        start_later(coordinator)
        announced.result(WAIT)
        with member(coordinator.address, shard(primary.member.incarnation)) as again:
            with pytest.raises(Fenced):
                primary.announce_state(WAIT)
            again.check()


@contextmanager
def process(port: int, folder: Path, ready: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A real ps-coordinator with leases of 8 seconds, ready to answer."""
    environment = {key: value for key, value in os.environ.items() if key != "TF_CONFIG"}
    ready.unlink(missing_ok=True)
    command = (sys.executable, "-m", "ps_server.coordinator.main", "--port", str(port), "--data-dir", str(folder))
    settings = ("--lease-seconds", "8", "--heartbeat-seconds", "0.1", "--ready-file", str(ready))
    with subprocess.Popen([*command, *settings], stderr=subprocess.DEVNULL, env=environment) as child:
        try:
            deadline = time.monotonic() + 60
            while not ready.exists():
                assert child.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            yield child
        finally:
            child.kill()


def test_a_coordinator_killed_and_away_for_longer_than_a_lease_finds_its_members_in_their_places(
    tmp_path: Path,
) -> None:
    port, ready = free_port(), tmp_path / "ready"
    address = f"127.0.0.1:{port}"
    with ExitStack() as stack:
        child = stack.enter_context(process(port, tmp_path, ready))
        s, w = (stack.enter_context(member(address, spec)) for spec in (shard(), WORKER))
        client = stack.enter_context(CoordinatorClient(address))
        for m in (s, w):
            m.set_stats(lambda: MemberStats(steps=1))
        before = w.wait_for(lambda view: len(view.members) == 2, WAIT)
        for _ in range(choose(2, 1)):
            child.kill()
            child.wait(WAIT)
            # Longer than a lease: this is what is tested, not a wait for something to happen.
            time.sleep(9.0)
            child = stack.enter_context(process(port, tmp_path, ready))
            wait_until_heard(client, s, w)
            with member(address) as newcomer:
                joined = newcomer.member
                after = w.wait_for(lambda view, joined=joined: joined in view.members, WAIT)
                assert after.revision > before.revision
                assert joined.incarnation > max(m.incarnation for m in before.members)
                newcomer.leave()
            before = w.wait_for(lambda view, joined=joined: joined not in view.members, WAIT)
            s.check(), w.check()
