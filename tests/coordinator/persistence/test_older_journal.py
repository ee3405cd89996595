"""A coordinator that comes back with an older journal: a member that knows more says so, and it gives up."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.client.membership import Membership
from ps_protocol.cluster.view import ClusterView, JoinRequest, Member, MemberStats, Role
from ps_protocol.errors import DamagedData, PsError, Unavailable
from ps_protocol.model.spec import Consistency, Mode
from ps_server.coordinator import main as coordinator_main
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.main import CoordinatorConfig, serve
from ps_server.coordinator.persistence.journal import Journal
from ps_server.coordinator.settings import ClusterSettings
from tests.coordinator.cluster import Cluster
from tests.coordinator.persistence.test_persisted_state import restarted
from tests.support.coordinators import running_coordinator
from tests.support.shards import wait_until

SETTINGS = ClusterSettings(lease_seconds=60.0, heartbeat_seconds=0.05)


def beat(driver: Driver, member: Member, mark: bytes) -> int:
    return driver.heartbeat(member.role, member.index, member.incarnation, MemberStats(), journal_mark=mark)


def told(folder: Path, copy: Path) -> tuple[Member, bytes]:
    """A member, and the mark it has of a change that the folder's ``copy`` does not know."""
    with Journal.open(folder) as journal:
        driver = Driver(SETTINGS, journal=journal)
        member = driver.join(JoinRequest(Role.WORKER, 0, "", "token")).member
        shutil.copytree(folder, copy)
        driver.set_consistency(Consistency(Mode.SSP, 2))
        assert driver.view.journal_mark == driver.journal_mark
        return member, driver.journal_mark


def test_a_member_that_knows_more_than_the_journal_proves_it_and_nothing_is_told_any_more(tmp_path: Path) -> None:
    async def run() -> None:
        with Journal.open(tmp_path / "copy") as journal:
            driver = Driver(SETTINGS, journal=journal)
            beat(driver, member, b"")
            with pytest.raises(DamagedData, match=r"older than what was on disk.*--accept-older-journal"):
                beat(driver, member, mark)
            assert driver.failed.is_set()
            with pytest.raises(DamagedData):
                beat(driver, member, b"")
            with pytest.raises(DamagedData):
                driver.set_consistency(Consistency(Mode.SYNC))
            with pytest.raises(DamagedData):
                await anext(driver.views(0))

    member, mark = told(tmp_path / "new", tmp_path / "copy")
    asyncio.run(run())


def test_no_view_of_an_older_journal_reaches_who_knows_more(tmp_path: Path) -> None:
    async def run() -> None:
        with Journal.open(tmp_path / "copy") as journal:
            driver = Driver(SETTINGS, journal=journal)
            with pytest.raises(DamagedData, match="older"):
                await anext(driver.views(0, mark))

    _, mark = told(tmp_path / "new", tmp_path / "copy")
    asyncio.run(run())


def test_the_process_ends_with_the_true_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    member, mark = told(tmp_path / "new", tmp_path / "copy")
    drivers: asyncio.Queue[Driver] = asyncio.Queue()

    def driver_made(*arguments: object, **more: object) -> Driver:
        driver = Driver(*arguments, **more)  # type: ignore[arg-type]
        drivers.put_nowait(driver)
        return driver

    async def run() -> None:
        with Journal.open(tmp_path / "copy") as journal:
            config = CoordinatorConfig("127.0.0.1", 0, None, SETTINGS)
            running = asyncio.create_task(serve(config, journal, asyncio.Event()))
            driver = await asyncio.wait_for(drivers.get(), 60)
            with pytest.raises(DamagedData):
                beat(driver, member, mark)
            await asyncio.wait_for(running, 60)

    monkeypatch.setattr(coordinator_main, "Driver", driver_made)
    with pytest.raises(DamagedData, match="older than what was on disk"):
        asyncio.run(run())


def test_members_of_a_running_job_tell_it_by_themselves_and_keep_their_view(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running_coordinator(SETTINGS, data) as coordinator, CoordinatorClient(coordinator.address) as client:
        worker = Membership.join(client, JoinRequest(Role.WORKER), 20.0)
        try:
            shutil.copytree(data, tmp_path / "copy")
            client.set_consistency(Consistency(Mode.SSP, 2))
            view: ClusterView = worker.wait_for(lambda view: view.consistency.mode is Mode.SSP, 60.0)
            coordinator.stop()
            shutil.rmtree(data)
            shutil.copytree(tmp_path / "copy", data)
            coordinator.start(replace(SETTINGS, first_incarnation=1))
            driver = coordinator._driver
            assert driver is not None
            wait_until(driver.failed.is_set)
            assert worker.fenced is None
            assert worker.view == view
            with pytest.raises(PsError) as caught:
                client.set_consistency(Consistency(Mode.SYNC))
            assert isinstance(caught.value, DamagedData | Unavailable)
        finally:
            worker.close()


def test_a_shard_with_state_of_an_incarnation_that_the_journal_never_gave_is_told_so() -> None:
    c = Cluster()
    first = c.shard()
    c.keep(first)
    again = restarted(c)
    with pytest.raises(DamagedData, match=r"journal is older than the state that shard 0 brings.*newest copy"):
        again.shard(state=first.member.incarnation + 1)
    again.shard(state=first.member.incarnation)
