"""Where most heartbeats are late, the coordinator is, and ends no lease for it at once. Pure, costs nothing."""

from __future__ import annotations

import asyncio
import logging

import pytest

from ps_protocol.cluster.view import Joined, JoinRequest, MemberStats, Role
from ps_protocol.errors import Fenced
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.membership.members import MANY
from ps_server.coordinator.settings import ClusterSettings
from tests.coordinator.cluster import Cluster


def cluster(count: int = MANY) -> tuple[Cluster, list[Joined]]:
    """Leases of 20 s, heartbeats of 1 s."""
    c = Cluster(lease_seconds=20.0, heartbeat_seconds=1.0)
    return c, [c.worker() for _ in range(count)]


def beat(c: Cluster, members: list[Joined], now: float) -> None:
    c.now = now
    for each in members:
        c.heartbeat(each)


def lost(c: Cluster, now: float) -> int:
    return len(c.state.membership.expire(now).value)


def test_one_of_many_that_is_silent_is_lost_at_the_end_of_its_lease() -> None:
    c, members = cluster()
    beat(c, members[1:], 19.0)
    assert lost(c, 20.0) == 1
    assert not c.state.membership.spares


def test_when_half_are_late_leases_last_until_heartbeats_come_again() -> None:
    c, members = cluster()
    half = MANY // 2
    beat(c, members[half:], 20.0)
    assert lost(c, 20.0) == 0
    assert c.state.membership.spares
    # All but one are heard of at last: it was not the coordinator.
    beat(c, members[1:], 24.0)
    ends = c.state.membership.next_expiry()
    assert ends is not None
    assert 20.0 < ends <= 25.0
    assert lost(c, ends) == 1
    with pytest.raises(Fenced, match="its lease of 20 s ended"):
        c.heartbeat(members[0])


def test_nobody_is_kept_for_more_than_twice_its_lease() -> None:
    c, _ = cluster()
    now = 20.0
    while not (count := lost(c, now)):
        ends = c.state.membership.next_expiry()
        assert ends is not None
        assert ends > now
        now = ends
    assert (count, now) == (MANY, 40.0)


def test_a_heartbeat_gives_back_what_was_kept() -> None:
    c, members = cluster()
    assert lost(c, 20.0) == 0
    beat(c, members, 20.5)
    assert c.state.membership.next_expiry() == 40.5


def test_among_few_members_half_may_be_dead() -> None:
    c, members = cluster(MANY - 1)
    beat(c, members[MANY // 2 :], 19.0)
    assert lost(c, 20.0) == MANY // 2


def test_late_is_later_than_a_heartbeat_that_is_due() -> None:
    c = Cluster(lease_seconds=20.0, heartbeat_seconds=10.0)
    members = [c.worker() for _ in range(MANY)]
    beat(c, members[1:], 6.0)
    assert lost(c, 20.0) == 1


def test_a_spared_member_whose_connection_ended_is_lost_when_others_are_heard_of() -> None:
    c, members = cluster()
    first = members[0].member
    c.state.membership.disconnected(first.role, first.index, first.incarnation, 10.0)
    assert lost(c, 15.0) == 0
    beat(c, members[1:], 15.5)
    assert lost(c, 16.0) == 1


def test_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    now = 0.0

    async def run() -> None:
        nonlocal now
        driver = Driver(ClusterSettings(lease_seconds=20.0, heartbeat_seconds=0.01), clock=lambda: now)
        for rank in range(MANY):
            driver.join(JoinRequest(Role.WORKER, rank, "", f"worker {rank}"))
        # As if the timer had been on time, and nobody heard.
        now = 21.0
        driver.start()
        async with asyncio.timeout(60.0):
            while "most heartbeats are late here" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            # A second time, in which it is said no more.
            driver.heartbeat(Role.WORKER, 0, driver.view.members[0].incarnation, MemberStats())
            now += 1.0
            for _ in range(20):
                await asyncio.sleep(0.01)
        assert len(driver.view.members) == MANY
        await driver.close()

    asyncio.run(run())
    assert caplog.text.count("most heartbeats are late") == 1
