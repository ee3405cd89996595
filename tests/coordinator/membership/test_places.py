"""Who may hold a place that is held: who proves that the holder is dead, or was told to take over; nobody else."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.client.membership import Membership
from ps_protocol.cluster.view import JoinRequest, Member, MemberStats, Role
from ps_protocol.errors import Fenced, InvalidRequest, PlaceTaken, PsError
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.settings import ClusterSettings
from tests.coordinator.cluster import Cluster
from tests.coordinator.persistence.test_persisted_state import restarted
from tests.support.coordinators import running_coordinator

SHARD = JoinRequest(Role.SHARD, 0, "10.0.0.5:7100", "first", host="node-5", pid=77)
WORKER = JoinRequest(Role.WORKER, 1, "", "first", host="node-5", pid=77)
SHORT = ClusterSettings(lease_seconds=0.4, heartbeat_seconds=0.1)


@pytest.mark.parametrize("first", [SHARD, WORKER, replace(WORKER, role=Role.EVALUATOR)])
def test_a_second_process_does_not_fence_a_live_one(first: JoinRequest) -> None:
    c = Cluster()
    holder = c.state.membership.join(first, 0.0).value
    c.now = 3.0
    view = c.state.view
    with pytest.raises(PlaceTaken, match=r"held by another process: node-5, process 77") as caught:
        c.state.membership.join(replace(first, token="second", pid=78), c.now)
    assert "held for 3 s, last heartbeat 3.0 s ago; its lease ends in 2.0 s" in caught.value.actual
    assert ("10.0.0.5:7100" in caught.value.message) == (first is SHARD)
    assert ("--take-over" if first is SHARD else "PS_TAKE_OVER=1") in caught.value.remedy
    assert c.state.view is view
    c.heartbeat(holder)


def test_a_durable_shard_is_not_fenced_by_one_with_a_directory_of_its_own() -> None:
    c = Cluster()
    holder = c.state.membership.join(replace(SHARD, directory="a"), 0.0).value
    c.keep(holder)
    for other in (replace(SHARD, token="b", directory="b"), replace(SHARD, token="none")):
        with pytest.raises(PlaceTaken):
            c.state.membership.join(other, 0.0)
    c.heartbeat(holder)


def test_the_next_process_with_its_directory_takes_the_place_at_once() -> None:
    c = Cluster()
    holder = c.state.membership.join(replace(SHARD, directory="a"), 0.0).value
    c.state.membership.join(replace(SHARD, token="next", directory="a"), 0.0)
    with pytest.raises(Fenced, match="took its place"):
        c.heartbeat(holder)


def test_a_lineage_is_known_again_by_a_coordinator_that_came_back() -> None:
    c = Cluster()
    c.state.membership.join(replace(WORKER, lineage="job"), 0.0)
    again = restarted(c)
    with pytest.raises(PlaceTaken):
        again.state.membership.join(replace(WORKER, token="stranger"), 0.0)
    again.state.membership.join(replace(WORKER, token="next", lineage="job"), 0.0)


@pytest.mark.parametrize("how", ["leaves", "expires"])
def test_a_place_whose_holder_has_gone_is_free(how: str) -> None:
    c = Cluster()
    holder = c.state.membership.join(WORKER, 0.0).value
    if how == "leaves":
        c.leave(holder)
    else:
        c.state.membership.expire(100.0)
    c.state.membership.join(replace(WORKER, token="second"), 100.0)


def test_older_state_is_named_as_such_while_the_place_is_held() -> None:
    c = Cluster()
    first = c.state.membership.join(replace(SHARD, directory="a"), 0.0).value
    c.keep(first)
    second = c.state.membership.join(
        replace(SHARD, token="2", directory="a", data_incarnation=first.member.incarnation), 0.0
    ).value
    c.keep(second)
    ask = replace(SHARD, token="3", directory="b", data_incarnation=first.member.incarnation)
    with pytest.raises(Fenced, match="newer state elsewhere"):
        c.state.membership.join(ask, 0.0)


def test_a_job_of_a_fixed_number_takes_no_more_workers_in_any_mode() -> None:
    c = Cluster(expected_workers=2)
    c.worker(), c.worker()
    with pytest.raises(
        PlaceTaken, match=r"2 workers, and all of them are live.*--workers 3, with a range .*--workers 0"
    ):
        c.worker()
    with pytest.raises(
        InvalidRequest, match=r"the job has at most 2 workers, and there is no rank 5.*rank from 0 to 1.*PS_RANK"
    ):
        c.worker(5)
    assert len(c.state.view.live(Role.WORKER)) == 2
    Cluster().worker(5)


def driven(body: Any) -> None:
    async def run() -> None:
        driver = Driver(SHORT)
        driver.start()
        try:
            await asyncio.wait_for(body(driver), 60)
        finally:
            await driver.close()

    asyncio.run(run())


def beat(driver: Driver, member: Member) -> None:
    driver.heartbeat(member.role, member.index, member.incarnation, MemberStats())


def test_a_process_started_again_by_hand_has_its_place_when_the_lease_of_the_one_before_ends() -> None:
    async def body(driver: Driver) -> None:
        old = driver.join(WORKER).member
        new = await driver.join_when_vacant(replace(WORKER, token="second"), 15.0)
        assert new.member.incarnation > old.incarnation
        with pytest.raises(Fenced, match="lease"):
            beat(driver, old)

    driven(body)


@pytest.mark.parametrize("index", [1, None])
def test_one_beside_a_live_process_is_refused_when_that_is_heard_of(index: int | None) -> None:
    async def body(driver: Driver) -> None:
        settings = replace(SHORT, expected_workers=2, lease_seconds=60.0)
        fixed = Driver(settings)
        members = [fixed.join(replace(WORKER, index=rank, token=str(rank))).member for rank in (0, 1)]
        asking = asyncio.create_task(fixed.join_when_vacant(replace(WORKER, index=index, token="second"), 60.0))
        await asyncio.sleep(0)
        assert not asking.done()
        for member in members:
            beat(fixed, member)
        with pytest.raises(PlaceTaken):
            await asking

    driven(body)


def test_who_may_not_wait_so_long_is_refused() -> None:
    async def body(driver: Driver) -> None:
        driver.join(WORKER)
        with pytest.raises(PlaceTaken, match="its lease ends in"):
            await driver.join_when_vacant(replace(WORKER, token="second"), 0.0)

    driven(body)


def test_a_worker_beside_a_live_one_of_its_rank_is_refused_and_the_live_one_trains_on() -> None:
    settings = ClusterSettings(lease_seconds=60.0, heartbeat_seconds=0.1)
    with running_coordinator(settings) as coordinator, CoordinatorClient(coordinator.address) as client:
        live = Membership.join(client, JoinRequest(Role.WORKER, 0), 20.0)
        try:
            with pytest.raises(PsError, match="worker 0 is held by another process") as caught:
                Membership.join(client, JoinRequest(Role.WORKER, 0), 20.0)
            assert type(caught.value) is PlaceTaken
            live.check()
        finally:
            live.close()


def test_a_supervisor_s_next_process_joins_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_LINEAGE", "job 7, worker 0")
    settings = ClusterSettings(lease_seconds=600.0, heartbeat_seconds=60.0)
    with running_coordinator(settings) as coordinator, CoordinatorClient(coordinator.address) as client:
        first = client.join(JoinRequest(Role.WORKER, 0), "first").member
        assert client.join(JoinRequest(Role.WORKER, 0), "second", 5.0).member.incarnation > first.incarnation
