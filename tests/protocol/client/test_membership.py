import logging
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise

import pytest

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.client.membership import Membership
from ps_protocol.cluster.view import ClusterView, JoinRequest, MemberStats, Role
from ps_protocol.errors import Fenced, NotReady, Unavailable, UnknownShard
from ps_protocol.launch.ports import free_port
from ps_server.coordinator.settings import ClusterSettings
from tests.support.coordinators import TestCoordinator, running_coordinator, stopped_coordinator
from tests.support.shards import wait_until

WAIT = 60.0
WORKER = JoinRequest(Role.WORKER)
#: Short beats, and leases that outlast a busy machine.
SETTINGS = ClusterSettings(lease_seconds=20.0, heartbeat_seconds=0.05, seed=5)


@contextmanager
def member(address: str, spec: JoinRequest = WORKER) -> Iterator[Membership]:
    with CoordinatorClient(address) as client:
        membership = Membership.join(client, spec, WAIT)
        try:
            yield membership
        finally:
            membership.close()


@pytest.fixture
def coordinator() -> Iterator[TestCoordinator]:
    with running_coordinator(SETTINGS) as running:
        yield running


def wait_until_fenced(membership: Membership) -> Fenced:
    with pytest.raises(Fenced) as caught:
        membership.wait_for(lambda view: False, WAIT)
    return caught.value


def wait_for_log(caplog: pytest.LogCaptureFixture, text: str) -> None:
    deadline = time.monotonic() + WAIT
    while not any(text in record.getMessage() for record in list(caplog.records)):
        assert time.monotonic() < deadline, f"no log line with {text!r}"
        time.sleep(0.01)


def test_a_member_knows_its_place_and_a_view_with_itself(coordinator: TestCoordinator) -> None:
    with member(coordinator.address, JoinRequest(Role.SHARD, 0, "127.0.0.1:1")) as m:
        assert (m.member.role, m.member.index, m.member.address) == (Role.SHARD, 0, "127.0.0.1:1")
        assert (m.seed, m.phase_at_join, m.lease_seconds) == (5, 0, 20.0)
        assert m.member in m.view.members
        assert m.fenced is None
        m.check()


def test_members_see_each_other_come_and_go(coordinator: TestCoordinator) -> None:
    with member(coordinator.address) as first:
        with member(coordinator.address) as second:
            first.wait_for(lambda view: second.member in view.members, WAIT)
            second.leave()
        view = first.wait_for(lambda view: second.member not in view.members, WAIT)
        assert view.members == (first.member,)


def test_statistics_that_never_come_cost_no_lease() -> None:
    settings = ClusterSettings(lease_seconds=60.0, heartbeat_seconds=0.05)
    begun, release = threading.Event(), threading.Event()

    def stuck() -> MemberStats:
        begun.set()
        release.wait()
        return MemberStats()

    with running_coordinator(settings) as coordinator, member(coordinator.address) as alive:
        alive.set_stats(stuck)
        assert begun.wait(WAIT)
        with CoordinatorClient(coordinator.address) as client:
            ages = [client.get_status(WAIT).members[0].seconds_since_heartbeat]
            # Each fall is a heartbeat that came.
            while sum(later < earlier for earlier, later in pairwise(ages)) < 5:
                ages.append(client.get_status(WAIT).members[0].seconds_since_heartbeat)
        alive.check()
        release.set()


def test_a_process_that_ends_is_noticed_long_before_its_lease_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_server.coordinator.times.DISCONNECTED_SECONDS", 2.0)
    settings = ClusterSettings(lease_seconds=3600.0, heartbeat_seconds=0.05)
    with (
        running_coordinator(settings) as coordinator,
        member(coordinator.address) as alive,
        member(coordinator.address) as dead,
    ):
        alive.wait_for(lambda view: dead.member in view.members, WAIT)
        dead.close()
        alive.wait_for(lambda view: dead.member not in view.members, WAIT)
        alive.check()


def test_statistics_travel_with_the_heartbeat_and_their_failure_does_not_cost_the_lease(
    coordinator: TestCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    with member(coordinator.address) as m, CoordinatorClient(coordinator.address) as client:
        m.set_stats(lambda: MemberStats(steps=42))
        while client.get_status().members[0].stats.steps != 42:
            pass
        m.set_stats(lambda: MemberStats(steps=1 // 0))
        wait_for_log(caplog, "statistics of worker 0 could not be read")
        while client.get_status().members[0].stats.steps == 42:
            pass
        m.check()


def test_a_subscriber_sees_the_present_view_and_then_each_new_one_in_order(coordinator: TestCoordinator) -> None:
    with member(coordinator.address) as m:
        seen: queue.SimpleQueue[ClusterView] = queue.SimpleQueue()
        m.subscribe(seen.put)
        assert seen.get_nowait() == m.view
        with member(coordinator.address), member(coordinator.address):
            revisions = [seen.get(timeout=WAIT).revision]
            while len(m.view.members) < 3 or revisions[-1] < m.view.revision:
                revisions.append(seen.get(timeout=WAIT).revision)
        assert revisions == sorted(set(revisions))


def test_a_subscriber_that_fails_does_not_keep_the_view_from_others(
    coordinator: TestCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    with member(coordinator.address) as m:
        first = m.view

        def fail(view: ClusterView) -> None:
            if view is not first:
                raise ValueError("subscriber")

        seen: queue.SimpleQueue[ClusterView] = queue.SimpleQueue()
        m.subscribe(fail)
        m.subscribe(seen.put)
        seen.get(timeout=WAIT)
        with member(coordinator.address):
            assert len(seen.get(timeout=WAIT).members) == 2
        assert "a subscriber failed" in caplog.text


def test_waiting_in_vain_says_what_for_and_what_is_there(coordinator: TestCoordinator) -> None:
    lacking = r"the shards did not come within 0.01 s.*0 of 1 shards and 1 workers"
    with member(coordinator.address) as m, pytest.raises(NotReady, match=lacking):
        m.wait_for(lambda view: view.started, 0.01, "the shards")


def test_closing_ends_a_wait_in_another_thread(coordinator: TestCoordinator) -> None:
    with member(coordinator.address) as m:
        failures: queue.SimpleQueue[Exception] = queue.SimpleQueue()

        def wait() -> None:
            try:
                m.wait_for(lambda view: False, WAIT)
            except Unavailable as error:
                failures.put(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        m.close()
        assert "closed" in str(failures.get(timeout=WAIT))
        waiter.join()


# Losing the place


def test_a_replaced_member_learns_it_at_once_and_never_sees_the_view_without_itself() -> None:
    # Heartbeats are rare here: it is the watch that brings the news.
    settings = replace(SETTINGS, lease_seconds=1200.0, heartbeat_seconds=600.0)
    with running_coordinator(settings) as coordinator, member(coordinator.address, JoinRequest(Role.WORKER, 0)) as old:
        seen: list[ClusterView] = []
        lost: queue.SimpleQueue[Fenced] = queue.SimpleQueue()
        old.subscribe(seen.append, lost.put)
        with member(coordinator.address, JoinRequest(Role.WORKER, 0, take_over=True)) as new:
            assert "took its place" in str(lost.get(timeout=60.0))
            assert new.member.incarnation > old.member.incarnation
        error = wait_until_fenced(old)
        assert (error.expected, error.remedy) != ("", "")
        assert all(old.member in view.members for view in seen)
        with pytest.raises(Fenced):
            old.check()


def test_a_subscriber_after_the_loss_is_told_too(coordinator: TestCoordinator) -> None:
    with member(coordinator.address, JoinRequest(Role.WORKER, 0)) as old:
        with member(coordinator.address, JoinRequest(Role.WORKER, 0, take_over=True)):
            wait_until_fenced(old)
        told: list[Fenced] = []
        old.subscribe(lambda view: None, told.append)
        assert len(told) == 1


def test_a_restarted_coordinator_fences_its_old_members(coordinator: TestCoordinator) -> None:
    with member(coordinator.address) as m:
        before = m.view
        coordinator.stop()
        coordinator.start(replace(SETTINGS, first_incarnation=10**6))
        assert "restarted without its journal" in str(wait_until_fenced(m))
        assert m.view == before


# The coordinator away


def test_while_the_coordinator_is_away_the_last_view_stays_and_one_line_says_so(
    coordinator: TestCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with member(coordinator.address) as m:
        before = m.view
        coordinator.disconnect()
        wait_for_log(caplog, "keeps the last view")
        assert m.view is before
        m.check()
        coordinator.reconnect()
        wait_for_log(caplog, "answers worker 0 again")
        with member(coordinator.address) as other:
            m.wait_for(lambda view: other.member in view.members, WAIT)
        lines = [r.getMessage() for r in caplog.records if "keeps the last view" in r.getMessage()]
        assert len(lines) == 1


def test_joining_waits_for_a_coordinator_that_is_not_there_yet_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_protocol.times.HINT_SECONDS", 0.1)
    with stopped_coordinator(SETTINGS) as late:
        late.port = free_port()
        address = f"127.0.0.1:{late.port}"
        told: list[str] = []

        def on_wait(text: str) -> None:
            told.append(text)
            if len(told) == 2:
                late.start()

        with CoordinatorClient(address) as client, Membership.join(client, WORKER, WAIT, on_wait) as m:
            assert m.member.index == 0
        assert len(told) >= 2
        assert f"waiting for the coordinator at {address}" in told[0]


def test_joining_gives_up_after_the_stated_time_naming_address_and_remedy() -> None:
    address = f"127.0.0.1:{free_port()}"
    told = rf"{address} did not answer within 0.2 s.*PS_COORDINATOR"
    with CoordinatorClient(address) as client, pytest.raises(Unavailable, match=told):
        Membership.join(client, WORKER, 0.2)


def own_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    """Threads of memberships that were not there ``before``: those of earlier tests may still be ending."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("ps-") and thread not in before]


def test_a_refused_join_raises_its_reason_and_leaves_no_thread(coordinator: TestCoordinator) -> None:
    before = set(threading.enumerate())
    with CoordinatorClient(coordinator.address) as client, pytest.raises(UnknownShard):
        Membership.join(client, JoinRequest(Role.SHARD, 9, "127.0.0.1:1"), WAIT)
    assert own_threads(before) == []


@pytest.mark.parametrize("spec", [WORKER, JoinRequest(Role.SHARD, 0, "127.0.0.1:1")], ids=["worker", "shard"])
def test_leaving_a_coordinator_that_is_gone_is_quick_and_raises_nothing(coordinator: TestCoordinator, spec) -> None:
    with member(coordinator.address, spec) as m:
        coordinator.stop()
        m.leave("by hand" if spec is WORKER else "")
        m.leave()


def test_a_worker_that_has_finished_says_so_when_the_coordinator_is_back(coordinator: TestCoordinator) -> None:
    with member(coordinator.address) as m:
        coordinator.disconnect()
        timer = threading.Timer(0.3, coordinator.reconnect)
        timer.start()
        m.leave()
        timer.join()
    with CoordinatorClient(coordinator.address) as client:
        assert [m.gone for m in client.get_status(WAIT).members] == ["left"]


def test_a_worker_that_has_finished_waits_no_longer_for_the_coordinator_than_it_was_told(coordinator, caplog) -> None:
    with member(coordinator.address) as m:
        coordinator.stop()
        m.leave("", 0.0)
    # A thread of the membership may say in between that it does not reach the coordinator.
    finished, silent = (
        next(number for number, record in enumerate(caplog.records) if text in record.getMessage())
        for text in ("has finished, and waits up to", "could not report that it leaves")
    )
    assert finished < silent
    assert {caplog.records[number].levelname for number in (finished, silent)} == {"WARNING"}


def test_a_closed_membership_leaves_no_thread(coordinator: TestCoordinator) -> None:
    before = set(threading.enumerate())
    with member(coordinator.address) as m:
        assert [thread.daemon for thread in own_threads(before)] == [True] * 3
        m.close()
        # One that waits for an answer is joined for two seconds only.
        wait_until(lambda: own_threads(before) == [])


def test_the_end_of_a_with_block_leaves_with_the_reason(
    coordinator: TestCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps_protocol.times.BRIEF_CALL_SECONDS", WAIT)
    with CoordinatorClient(coordinator.address) as client:
        with suppress(ZeroDivisionError), Membership.join(client, WORKER, WAIT):
            raise ZeroDivisionError("by hand")
        with Membership.join(client, WORKER, WAIT):
            pass
        assert [m.gone for m in client.get_status().members] == ["left: ZeroDivisionError: by hand", "left"]


def test_leaving_tells_the_last_numbers_and_what_has_left_has_no_rates(
    coordinator: TestCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps_protocol.times.BRIEF_CALL_SECONDS", WAIT)
    with member(coordinator.address) as m, CoordinatorClient(coordinator.address) as client:
        m.close()
        m._closed.clear()  # its threads have ended: no heartbeat but the one at the end
        m.set_stats(lambda: MemberStats(steps=500, samples=8000, steps_per_second=9.0, samples_per_second=1.0))
        m.leave()
        (gone,) = client.get_status().members
        assert (gone.stats.steps, gone.stats.samples) == (500, 8000)
        assert (gone.stats.steps_per_second, gone.stats.samples_per_second) == (0.0, 0.0)


# Interruption


def test_a_barrier_outlives_a_break_of_the_connection(coordinator: TestCoordinator) -> None:
    with CoordinatorClient(coordinator.address) as client, ThreadPoolExecutor(1) as pool:
        client.join(JoinRequest(Role.SHARD, 0, "127.0.0.1:1"), "shard")
        a, b, c = (client.join(WORKER, f"worker {i}").member for i in range(3))
        parked = pool.submit(client.barrier, a, 0, 20.0)
        while a.index in client.barrier(b, 0, 0.0).missing_ranks:
            pass
        coordinator.disconnect()
        coordinator.reconnect()
        assert client.barrier(c, 0, 20.0).released
        assert parked.result(WAIT).released


@pytest.mark.parametrize(
    "wait",
    [
        "client.wait_until_reachable(60)",
        "client.get_status(60)",
    ],
)
def test_ctrl_c_gets_through_a_wait_at_once(wait: str) -> None:
    script = (
        "import os, signal, threading, time\n"
        "from ps_protocol.client.coordinator import CoordinatorClient\n"
        f"client = CoordinatorClient('127.0.0.1:{free_port()}')\n"
        "sent = []\n"
        "def interrupt():\n"
        "    sent.append(time.monotonic())\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "try:\n"
        "    threading.Timer(0.3, interrupt).start()\n"
        f"    {wait}\n"
        "except KeyboardInterrupt:\n"
        "    print(time.monotonic() - sent[0])\n"
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    # 0.2 s on an idle machine; the rest is for one that is not. The wait itself takes 60 s.
    assert float(child.stdout) < 20.0
