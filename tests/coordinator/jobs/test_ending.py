"""A finished job needs nobody once its last checkpoint is there; who is to, ends with it."""

import asyncio
from itertools import count
from types import SimpleNamespace

import pytest

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import JoinRequest, Role
from ps_server.cli.options.storage import Durability, StorageConfig
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.jobs import ending
from ps_server.coordinator.settings import ClusterSettings
from ps_server.shard.config import ShardConfig
from ps_server.shard.process import serve
from tests.support.coordinators import running_coordinator
from tests.support.loops import LoopThread
from tests.support.shards import wait_until

TOKENS = count()


def applicant(role: Role, index: int) -> JoinRequest:
    address = "host:1" if role is Role.SHARD else ""
    return JoinRequest(role, index, address, f"{role.value} {index} {next(TOKENS)}")


async def until(condition) -> None:
    for _ in range(12000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the awaited state did not come within 60 s")


def ended(check, monkeypatch, *, exits: bool = True) -> None:
    """Run ``check`` on a coordinator with a shard and a worker that has left."""

    async def run() -> None:
        monkeypatch.setattr("ps_server.coordinator.times.LOOK_SECONDS", 0.001)
        driver, stop = Driver(ClusterSettings(expected_workers=1, lease_seconds=600)), asyncio.Event()
        checkpoints = SimpleNamespace(settled=True)
        shard = driver.join(applicant(Role.SHARD, 0)).member
        worker = driver.join(applicant(Role.WORKER, 0)).member
        watching = asyncio.create_task(ending.end_with_job(driver, checkpoints, stop if exits else None))
        try:
            await check(driver, checkpoints, stop, shard, worker)
        finally:
            watching.cancel()

    asyncio.run(run())


def leave(driver, member) -> None:
    driver.leave(member.role, member.index, member.incarnation, "")


def test_members_are_told_when_the_last_checkpoint_is_there_and_the_coordinator_ends_after_them(monkeypatch):
    async def check(driver, checkpoints, stop, shard, worker) -> None:
        checkpoints.settled = False
        leave(driver, worker)
        await until(lambda: driver.view.finished)
        await asyncio.sleep(0.05)  # time for what must not happen
        assert not driver.view.released
        checkpoints.settled = True
        await until(lambda: driver.view.released)
        await asyncio.sleep(0.05)  # time for what must not happen
        assert not stop.is_set()
        leave(driver, shard)
        await until(stop.is_set)

    ended(check, monkeypatch)


def test_a_member_that_never_leaves_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr("ps_protocol.times.FAREWELL_SECONDS", 0.01)

    async def check(driver, checkpoints, stop, shard, worker) -> None:
        leave(driver, worker)
        await until(stop.is_set)

    ended(check, monkeypatch)


def test_a_worker_that_comes_back_needs_them_again(monkeypatch):
    async def check(driver, checkpoints, stop, shard, worker) -> None:
        leave(driver, worker)
        await until(lambda: driver.view.released)
        driver.join(applicant(Role.WORKER, 0))
        assert not driver.view.finished
        assert not driver.view.released

    ended(check, monkeypatch, exits=False)


def test_who_is_to_stay_stays(monkeypatch):
    async def check(driver, checkpoints, stop, shard, worker) -> None:
        leave(driver, worker)
        leave(driver, shard)
        await until(lambda: driver.view.released)
        await asyncio.sleep(0.05)  # time for what must not happen
        assert not stop.is_set()

    ended(check, monkeypatch, exits=False)


@pytest.mark.parametrize("standby", [False, True])
def test_a_shard_that_is_to_end_with_its_job_ends_when_it_is_released(standby, tmp_path):
    settings = ClusterSettings(expected_workers=1, lease_seconds=600, heartbeat_seconds=0.05)
    with (
        running_coordinator(settings) as coordinator,
        CoordinatorClient(coordinator.address) as client,
        LoopThread() as loop,
    ):
        if standby:
            client.join(JoinRequest(Role.SHARD, 0, "127.0.0.1:1"), "holder")
        kept = StorageConfig(Durability.DURABLE, tmp_path) if standby else StorageConfig()
        config = ShardConfig(
            shard=0,
            coordinator=coordinator.address,
            threads=1,
            storage=kept,
            standby=standby,
            exit_when_finished=True,
        )
        served = asyncio.run_coroutine_threadsafe(serve(config, asyncio.Event()), loop.loop)
        wait_until(lambda: bool(client.get_status().view.live(Role.STANDBY if standby else Role.SHARD)))
        client.leave(client.join(JoinRequest(Role.WORKER, 0), "w").member)
        assert client.get_status().view.finished
        assert not served.done()
        coordinator._loop.loop.call_soon_threadsafe(coordinator._driver.release)
        served.result(60)
