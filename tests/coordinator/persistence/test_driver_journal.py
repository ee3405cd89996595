"""The driver writes before it tells."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ps_protocol.cluster.leases import LeaseAsk
from ps_protocol.cluster.view import JoinRequest, Member, MemberStats, Role
from ps_protocol.cluster.weights import FollowAsk, PublishAsk, WeightsPiece
from ps_protocol.errors import ConfigError, Fenced, Unavailable
from ps_protocol.model.spec import Consistency, DType, Mode, ModelSpec, Variable
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.persistence.journal import Journal
from ps_server.coordinator.settings import ClusterSettings
from tests.coordinator.cluster import declare

SETTINGS = ClusterSettings(lease_seconds=60.0, heartbeat_seconds=0.05)


class CountingJournal(Journal):
    """A real one that counts, and refuses while it is told to."""

    refuses = False
    writes = 0

    def write(self, rows: Mapping[str, bytes | None]) -> None:
        if self.refuses:
            raise Unavailable("the coordinator cannot write its journal: injected")
        self.writes += 1
        super().write(rows)


def driven(folder: Path, *bodies: Callable[[Driver, CountingJournal], Coroutine[Any, Any, None]]) -> None:
    """Each body with a driver of its own, one after the other, on one journal."""

    async def run() -> None:
        for body in bodies:
            with CountingJournal.open(folder) as journal:
                assert isinstance(journal, CountingJournal)
                driver = Driver(SETTINGS, journal=journal)
                driver.start()
                try:
                    await asyncio.wait_for(body(driver, journal), 60)
                finally:
                    await driver.close()

    asyncio.run(run())


def worker(rank: int, life: int = 0) -> JoinRequest:
    return JoinRequest(Role.WORKER, rank, "", f"worker {rank} life {life}")


SHARD = JoinRequest(Role.SHARD, 0, "host:1", "shard")

SPEC = ModelSpec("net", "torch.optim.SGD", (Variable("v", (2,), DType.FLOAT32),), ({"lr": 0.1},))


def beat(driver: Driver, member: Member, **more: Any) -> int:
    return driver.heartbeat(member.role, member.index, member.incarnation, MemberStats(), **more)


def test_a_driver_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    told: dict[str, Any] = {}

    async def first(driver: Driver, journal: CountingJournal) -> None:
        driver.join(SHARD)
        told["worker"] = driver.join(worker(0)).member
        told["map"] = declare(driver, told["worker"])
        told["view"] = driver.set_consistency(Consistency(Mode.SSP, 3))

    async def second(driver: Driver, journal: CountingJournal) -> None:
        assert driver.status().view == told["view"]
        assert driver.shard_map("net") == told["map"]
        assert beat(driver, told["worker"]) == told["view"].revision
        later = driver.join(worker(1)).member
        assert later.incarnation > told["worker"].incarnation

    driven(tmp_path, first, second)


def test_heartbeats_waits_and_repetitions_write_nothing(tmp_path: Path) -> None:
    async def body(driver: Driver, journal: CountingJournal) -> None:
        shard, member = driver.join(SHARD).member, driver.join(worker(0)).member
        driver.join(worker(1))
        declare(driver, member)
        beat(driver, shard, keeps_state=True)
        before = journal.writes
        for _ in range(100):
            beat(driver, member)
            beat(driver, shard, keeps_state=True)
            driver.join(worker(0))
            declare(driver, member)
            await driver.barrier(0, member.incarnation, 0, 0.0)
        assert journal.writes == before

    driven(tmp_path, body)


def test_leases_on_data_are_kept_with_their_holders_and_freed_with_them(tmp_path: Path) -> None:
    holder: list[Member] = []

    def ask(sequence: int) -> LeaseAsk:
        return LeaseAsk("digits", length=100, epoch=0, lease_items=60, sequence=sequence)

    async def first(driver: Driver, journal: CountingJournal) -> None:
        member = driver.join(worker(0)).member
        holder.append(member)
        assert (await driver.lease_data(0, member.incarnation, ask(1), 0.0)).span

    async def second(driver: Driver, journal: CountingJournal) -> None:
        member = driver.join(worker(1)).member
        answer = await driver.lease_data(1, member.incarnation, ask(1), 0.0)
        assert answer.span is not None
        assert (answer.span.begin, answer.span.end) == (60, 100)
        driver.leave(Role.WORKER, 0, holder[0].incarnation, "gone")
        answer = await driver.lease_data(1, member.incarnation, ask(2), 0.0)
        assert answer.span is not None
        assert (answer.span.begin, answer.span.end) == (0, 60)

    driven(tmp_path, first, second)


def test_while_the_journal_refuses_nothing_new_is_told_and_afterwards_all_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(driver: Driver, journal: CountingJournal) -> None:
        shard, member = driver.join(SHARD).member, driver.join(worker(0)).member
        declare(driver, member)
        views = driver.views(0)
        before = await anext(views)
        news = asyncio.ensure_future(anext(views))

        journal.refuses = True
        for _ in range(2):
            with pytest.raises(Unavailable, match="cannot write its journal"):
                driver.join(worker(1))
            with pytest.raises(Unavailable, match="cannot write its journal"):
                beat(driver, shard, keeps_state=True)
        assert beat(driver, member) == before.revision
        for _ in range(1000):
            if "nothing new is sent until the journal can be written" in caplog.text:
                break
            await asyncio.sleep(0.01)
        assert not news.done()

        journal.refuses = False
        view = await news
        assert [m.index for m in view.members if m.role is Role.WORKER] == [0, 1]
        joined = driver.join(worker(1)).member
        assert joined in view.members
        await views.aclose()

    with caplog.at_level(logging.WARNING):
        driven(tmp_path, body)
    assert caplog.text.count("nothing new is sent") == 1


def test_a_version_of_weights_is_told_once_the_journal_has_it_and_comes_back_from_there(tmp_path: Path) -> None:
    ask = PublishAsk("policy", "net", 5, "{}", 8, "token")

    async def publish(driver: Driver, journal: CountingJournal) -> None:
        shard, member = driver.join(SHARD).member, driver.join(worker(0)).member
        declare(driver, member, SPEC)
        assert driver.plan_publication(0, member.incarnation, ask).number == 1
        journal.refuses = True
        with pytest.raises(Unavailable):
            driver.commit_publication(ask, 1, [WeightsPiece(0, shard.incarnation, "", b"c" * 16, 8)])
        with pytest.raises(Unavailable):
            await driver.follow_weights(FollowAsk("policy", 0, 0, "r"), 0.0)
        for again in (ask, replace(ask, token="another")):
            with pytest.raises(Unavailable):
                driver.plan_publication(0, member.incarnation, again)
        journal.refuses = False
        assert driver.plan_publication(0, member.incarnation, ask).made is not None
        answer = await driver.follow_weights(FollowAsk("policy", 0, 0, "r"), 0.0)
        assert answer.version is not None
        assert answer.version.number == 1

    async def restarted(driver: Driver, journal: CountingJournal) -> None:
        answer = await driver.follow_weights(FollowAsk("policy", 0, 0, "r"), 0.0)
        assert answer.version is not None
        assert (answer.version.number, answer.version.step) == (1, 5)
        assert answer.addresses == {0: SHARD.address}

    driven(tmp_path, publish, restarted)


def test_an_incarnation_that_was_never_written_was_never_told(tmp_path: Path) -> None:
    told: list[int] = []

    async def first(driver: Driver, journal: CountingJournal) -> None:
        told.append(driver.join(worker(0)).member.incarnation)
        journal.refuses = True
        with pytest.raises(Unavailable):
            driver.join(worker(1))

    async def second(driver: Driver, journal: CountingJournal) -> None:
        assert [m.incarnation for m in driver.status().view.members] == told
        told.append(driver.join(worker(1)).member.incarnation)

    driven(tmp_path, first, second)
    assert told[1] > told[0]


def test_a_shard_with_older_state_is_refused_after_a_restart_too(tmp_path: Path) -> None:
    lives: list[int] = []

    async def first(driver: Driver, journal: CountingJournal) -> None:
        for state in (0, 1):
            brings = lives[0] if state else 0
            ask = JoinRequest(Role.SHARD, 0, "host:1", f"shard {state}", data_incarnation=brings, lineage="s")
            member = driver.join(ask).member
            beat(driver, member, keeps_state=True)
            lives.append(member.incarnation)

    async def second(driver: Driver, journal: CountingJournal) -> None:
        with pytest.raises(Fenced, match=f"incarnation {lives[1]}; actual: state of incarnation {lives[0]}"):
            driver.join(JoinRequest(Role.SHARD, 0, "host:2", "old", data_incarnation=lives[0]))

    driven(tmp_path, first, second)


def test_settings_of_another_job_leave_the_journal_as_it_was(tmp_path: Path) -> None:
    async def body(driver: Driver, journal: CountingJournal) -> None:
        driver.join(worker(0))

    driven(tmp_path, body)
    with Journal.open(tmp_path) as journal:
        before = journal.read()
        with pytest.raises(ConfigError, match="--shards 1; actual: --shards 2"):
            Driver(ClusterSettings(expected_shards=2), journal=journal)
        assert journal.read() == before
