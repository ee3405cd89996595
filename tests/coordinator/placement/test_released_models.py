"""The coordinator releases a model that no worker uses, once, and remembers it over restarts. No process, 1 s."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from ps_protocol.cluster.view import ClosedModelAsk, Joined, Member, Role
from ps_protocol.errors import Fenced, ModelReleased, NotReady, Unavailable, UnknownModel
from ps_protocol.model.spec import ShardMap
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.jobs.declaring import DeclarationThread
from ps_server.coordinator.jobs.release_runner import ReleaseRunner
from ps_server.coordinator.placement import state as placement_state
from tests.coordinator.cluster import SPEC, Cluster, declare
from tests.coordinator.persistence.test_driver_journal import SETTINGS, SHARD, CountingJournal, worker
from tests.coordinator.persistence.test_persisted_state import Kept, restarted

OTHER = replace(SPEC, optimizer="torch.optim.Adam")


def job(workers: int = 2) -> tuple[Cluster, list[Joined]]:
    """A model that these workers use."""
    c = Cluster()
    c.shard()
    members = [c.worker() for _ in range(workers)]
    for member in members:
        c.declare(member)
    return c, members


def close(c: Cluster, member: Joined, epoch: int = 1) -> str:
    return c.state.placement.close(member.member, "net", epoch).reason


def test_it_is_refused_while_live_workers_use_it_and_they_are_named() -> None:
    c, (a, b, gone) = job(3)
    c.leave(gone)
    before = c.state.view
    with pytest.raises(NotReady, match="model 'net' is used by workers 0, 1"):
        c.state.placement.release("net")
    assert c.state.view == before
    assert close(c, a) == "worker 0 has closed model 'net'"
    assert close(c, a) == ""
    with pytest.raises(NotReady, match="model 'net' is used by worker 1;") as caught:
        c.state.placement.release("net")
    assert "optimizer.close()" in caught.value.remedy
    close(c, b)
    decision = c.state.placement.release("net")
    assert decision.value == 4 * (400 + 4 + 4)
    assert decision.reason == "model 'net' is released: 1632 bytes and 0 tables"
    assert (c.state.view.models, c.state.view.released_models) == ({}, {"net": 1})
    assert c.state.view.revision == before.revision + 1


def test_a_worker_that_came_back_uses_it_when_it_has_declared_it_again() -> None:
    c, (a,) = job(1)
    again = c.worker(0)
    # The process before it is gone, and a late call of it ends nothing.
    c.declare(again)
    assert close(c, a) == ""
    with pytest.raises(NotReady, match="worker 0"):
        c.state.placement.release("net")


def test_a_released_model_is_unknown_and_the_next_of_its_name_is_another_one() -> None:
    c, (a,) = job(1)
    close(c, a)
    c.state.placement.release("net")
    for call in (c.state.placement.shard_map, c.state.placement.release):
        with pytest.raises(ModelReleased, match="model 'net' was released"):
            call("net")
    with pytest.raises(UnknownModel):
        c.state.placement.release("never")
    assert c.declare(a, OTHER).epoch == 2
    assert c.state.view.was_released("net", 1)
    assert not c.state.view.was_released("net", 2)
    # The call that released the first, repeated after its answer was lost.
    assert close(c, a, epoch=1) == ""
    assert c.state.placement.release("net", epoch=1).reason == ""
    assert c.state.view.models == {"net": 2}
    close(c, a, epoch=2)
    c.state.placement.release("net")
    assert c.state.view.released_models == {"net": 2}
    assert c.declare(a).epoch == 3


def test_a_model_of_a_checkpoint_is_not_restored_under_a_name_that_was_released() -> None:
    c, (a,) = job(1)
    close(c, a)
    c.state.placement.release("net")

    def as_saved(shard_map: ShardMap) -> ShardMap:
        raise AssertionError(shard_map)

    assert c.state.placement.plan(a.member, OTHER, as_saved).make().epoch == 2


def test_a_declaration_that_a_release_overtook_is_made_again() -> None:
    c, (a, b) = job()
    close(c, a), close(c, b)
    known = c.state.placement.plan(a.member, SPEC)
    c.state.placement.release("net")
    with pytest.raises(NotReady, match="'net' was released meanwhile"):
        c.state.placement.adopt(a.member, known, known.make())
    assert c.state.view.models == {}
    assert c.declare(a).epoch == 2


def test_nothing_is_released_while_slices_move() -> None:
    c, (a,) = job(1)
    close(c, a)
    c.state.placement.begin_move("move")
    with pytest.raises(NotReady, match="slices are being moved"):
        c.state.placement.release("net")
    c.state.placement.abort_move("move")
    c.state.placement.release("net")


def test_as_many_released_models_are_remembered_as_the_limit_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_state, "RELEASED_MODELS", 2)
    c, (a,) = job(1)
    for name in ("one", "two", "one", "three"):
        c.declare(a, replace(SPEC, name=name))
        c.state.placement.close(a.member, name, 9)
        c.state.placement.release(name)
    assert c.state.view.released_models == {"one": 2, "three": 1}


def test_after_a_restart_it_is_known_who_uses_what_and_what_was_released() -> None:
    c, (a, b) = job()
    kept = Kept()
    close(c, a)
    again = restarted(c, kept)
    with pytest.raises(NotReady, match="used by worker 1;"):
        again.state.placement.release("net")
    close(again, b)
    again.state.placement.release("net")
    last = restarted(again, kept)
    assert last.state.view.released_models == {"net": 1}
    assert not any(key.startswith(("uses/", "map/")) for key in kept.rows)
    assert last.declare(a).epoch == 2


def driver_of(folder: Path) -> tuple[Driver, CountingJournal]:
    journal = CountingJournal.open(folder)
    assert isinstance(journal, CountingJournal)
    return Driver(SETTINGS, journal=journal), journal


def test_nobody_is_told_of_a_release_before_it_is_on_disk(tmp_path: Path) -> None:
    """The journal refuses, the coordinator is killed there and starts again: the model is as it was."""
    driver, journal = driver_of(tmp_path)
    with journal:
        driver.join(SHARD)
        member = driver.join(worker(0)).member
        declare(driver, member)
        driver._state.placement.close(member, "net", 1)
        before = driver.view
        journal.refuses = True
        with pytest.raises(Unavailable):
            driver.release_model("net")
        assert driver.view == before
    again, journal = driver_of(tmp_path)
    with journal:
        assert again.view.models == {"net": 1}
        with pytest.raises(NotReady, match="worker 0"):
            again.release_model("net")
    # Killed as soon as it was written.
    driver, journal = driver_of(tmp_path)
    with journal:
        driver._state.placement.close(member, "net", 1)
        driver.release_model("net")
    again, journal = driver_of(tmp_path)
    with journal:
        assert (again.view.models, again.view.released_models) == ({}, {"net": 1})
        assert again.release_model("net", 1) == 0


def ask(release: bool = True, epoch: int = 1) -> ClosedModelAsk:
    return ClosedModelAsk("net", epoch, release)


def running(body) -> None:
    """``body`` with a driver that has two workers who use a model, its runner and the lock of checkpoints."""

    async def run() -> None:
        driver = Driver(SETTINGS)
        driver.join(SHARD)
        members = [driver.join(worker(rank)).member for rank in range(2)]
        for member in members:
            declare(driver, member)
        busy = asyncio.Lock()
        await asyncio.wait_for(body(driver, ReleaseRunner(driver, busy), busy, members), 30)
        await driver.close()

    asyncio.run(run())


def close_by(runner: ReleaseRunner, member: Member, asked: ClosedModelAsk, seconds: float) -> asyncio.Task[None]:
    return asyncio.create_task(runner.close(member.index, member.incarnation, asked, seconds))


@pytest.mark.parametrize("second", [True, False], ids=["releases", "closes"])
def test_the_last_worker_that_closes_it_releases_it_for_all(second: bool) -> None:
    async def body(driver: Driver, runner: ReleaseRunner, _: asyncio.Lock, members: list[Member]) -> None:
        with pytest.raises(NotReady, match="used by worker 1;"):
            await close_by(runner, members[0], ask(), 0.01)
        waiting = close_by(runner, members[0], ask(), 25.0)
        await asyncio.sleep(0)
        await close_by(runner, members[1], ask(second), 25.0)
        await waiting
        assert driver.view.released_models == {"net": 1}
        # Repeated, after the answer was lost.
        await close_by(runner, members[0], ask(), 0.0)

    running(body)


def test_a_worker_that_dies_is_not_waited_for() -> None:
    async def body(driver: Driver, runner: ReleaseRunner, _: asyncio.Lock, members: list[Member]) -> None:
        waiting = close_by(runner, members[0], ask(), 25.0)
        await asyncio.sleep(0)
        driver.leave(Role.WORKER, 1, members[1].incarnation, "killed")
        await waiting
        assert driver.view.models == {}
        with pytest.raises(Fenced):
            await close_by(runner, members[1], ask(), 0.0)

    running(body)


def test_a_checkpoint_or_a_batch_of_a_move_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_server.coordinator.times.BUSY_SECONDS", 0.05)

    async def body(driver: Driver, runner: ReleaseRunner, busy: asyncio.Lock, members: list[Member]) -> None:
        for member in members:
            await close_by(runner, member, ask(release=False), 0.0)
        async with busy:
            with pytest.raises(NotReady, match="a checkpoint is made or slices are moved"):
                await runner.release("net")
            assert driver.view.models == {"net": 1}
        assert await runner.release("net") == 1632

    running(body)


def test_shard_maps_of_released_models_are_not_kept_as_messages() -> None:
    async def body(driver: Driver, runner: ReleaseRunner, _: asyncio.Lock, members: list[Member]) -> None:
        declaring = DeclarationThread(driver)
        await declaring.shard_map("net")
        for member in members:
            await close_by(runner, member, ask(release=False), 0.0)
        await runner.release("net")
        declare(driver, members[0], replace(SPEC, name="other"))
        await declaring.shard_map("other")
        assert list(declaring._messages) == ["other"]
        with pytest.raises(ModelReleased):
            await declaring.shard_map("net")

    running(body)


def test_a_rank_that_another_process_took_is_not_mistaken_for_the_one_before() -> None:
    c, _ = job(1)
    again = c.worker(0)
    assert c.state.placement.uses.ranks("net", c.state.view.live(Role.WORKER)) == []
    c.state.placement.release("net")
    assert c.declare(again).epoch == 2
