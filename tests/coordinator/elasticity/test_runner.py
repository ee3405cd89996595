"""What the policy decides is told as events and carried out. Costs about 1 CPU s."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ps_protocol.cluster.view import JoinRequest, MemberStats, Role
from ps_protocol.errors import Unavailable
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.elasticity.policy import ElasticSettings
from ps_server.coordinator.elasticity.runner import ElasticityRunner, look_of
from tests.coordinator.cluster import Cluster
from tests.coordinator.moving_job import Job, on_job


class FakeEngine:
    def __init__(self) -> None:
        self.asked: list[tuple[int, tuple[int, ...]]] = []
        self.error: Exception | None = None

    def request(self, wanted: int, ranks: tuple[int, ...]) -> str:
        self.asked.append((wanted, ranks))
        if self.error:
            raise self.error
        return "two are on their way"

    def describe(self) -> str:
        return "a fake"


def beat(driver: Driver, role: Role, index: int, **stats: Any) -> None:
    member = driver.view.live(role)[index]
    driver.heartbeat(role, index, member.incarnation, MemberStats(**stats))


def texts(driver: Driver) -> list[str]:
    """Events; those of single moves are left out."""
    return [event.text for event in driver.events.all if not event.text.startswith("move ")]


async def look_for(runner: ElasticityRunner, now: list[float], seconds: int) -> None:
    for _ in range(seconds):
        now[0] += 1.0
        runner.look()
    await runner.settled()


@on_job
async def test_a_hot_shard_is_relieved_by_a_move(job: Job) -> None:
    now = [0.0]
    runner = ElasticityRunner(job.driver, job.moves, ElasticSettings(rebalance=True), None, lambda: now[0])
    beat(job.driver, Role.SHARD, 0, bytes_per_second=7e6)
    beat(job.driver, Role.SHARD, 1, bytes_per_second=1e6)
    assert job.held == [4, 4, 0]
    await look_for(runner, now, 32)
    assert job.held == [3, 5, 0]
    assert texts(job.driver)[-3:] == [
        "shard 0 is hot: 7.0 MB/s, the mean is 4.0",
        "43% of shard 0 moves to shard 1: 7.0 MB/s, 1.0 there",
        "0.0 MB have moved from shard 0 to shard 1",
    ]
    job.check_all_go_on()


@on_job
async def test_a_shard_whose_queue_is_long_gives_a_tenth_and_nothing_where_no_slice_is_that_small(job: Job) -> None:
    now = [0.0]
    runner = ElasticityRunner(job.driver, job.moves, ElasticSettings(rebalance=True), None, lambda: now[0])
    beat(job.driver, Role.SHARD, 0, bytes_per_second=4e6, queued_pushes=3.0, queued_bytes=6e6)
    beat(job.driver, Role.SHARD, 1, bytes_per_second=4e6)
    await look_for(runner, now, 32)
    assert texts(job.driver)[-3:] == [
        "shard 0 is hot: 3.0 pushes (6.0 MB) wait, the mean is 1.5",
        "10% of shard 0 moves to shard 1: 3.0 pushes wait, 0.0 there",
        # It has four slices.
        "nothing has moved from shard 0: no whole slice or bucket fits",
    ]
    assert job.held == [4, 4, 0]
    job.check_all_go_on()


@on_job
async def test_a_move_that_fails_is_told(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    runner = ElasticityRunner(job.driver, job.moves, ElasticSettings(rebalance=True), None, lambda: now[0])
    monkeypatch.setattr(job.moves, "_running", True)
    beat(job.driver, Role.SHARD, 0, bytes_per_second=7e6)
    beat(job.driver, Role.SHARD, 1, bytes_per_second=1e6)
    await look_for(runner, now, 32)
    assert texts(job.driver)[-1] == "moving from shard 0 has failed: slices are being moved already"


@on_job
async def test_lost_workers_are_asked_for_and_what_the_engine_did_is_told(job: Job) -> None:
    now, engine = [0.0], FakeEngine()
    runner = ElasticityRunner(job.driver, job.moves, ElasticSettings(workers=2), engine, lambda: now[0])
    job.driver.join(JoinRequest(Role.WORKER, 1, "", "second"))
    await look_for(runner, now, 100)
    assert not engine.asked
    member = job.driver.view.live(Role.WORKER)[1]
    job.driver.leave(Role.WORKER, 1, member.incarnation, "ValueError: no")
    assert look_of(job.driver.status()).lost == {1}
    await look_for(runner, now, 32)
    assert engine.asked == [(2, (1,))]
    told = ["1 of 2 workers are there, lost: 1", "workers were asked for: two are on their way"]
    assert texts(job.driver)[-2:] == told
    # The status has them without what else has happened.
    assert [each.text for each in job.driver.status().decisions] == told
    assert [each.warning for each in job.driver.status().decisions] == [True, False]
    engine.error = Unavailable("not now")
    await look_for(runner, now, 60)
    assert texts(job.driver)[-1].startswith("workers were not asked for: not now")
    engine.error = ValueError("a defect")
    await look_for(runner, now, 120)
    assert texts(job.driver)[-1] == "workers were not asked for: ValueError: a defect"
    assert len(engine.asked) == 3


def test_a_job_without_workers_waits_and_asks_for_them() -> None:
    c = Cluster(expected_shards=1, expected_workers=1)
    c.shard()
    assert not look_of(c.state.status(0.0)).waiting
    lost = c.worker(0)
    assert look_of(c.state.status(0.0)).training
    c.leave(lost, "ValueError: no")
    look = look_of(c.state.status(0.0))
    assert (look.training, look.waiting, look.lost) == (False, True, {0})
    c.leave(c.worker(0))
    assert not look_of(c.state.status(0.0)).waiting


@on_job
async def test_a_worker_that_has_left_after_training_is_not_asked_for(job: Job) -> None:
    now, engine = [0.0], FakeEngine()
    runner = ElasticityRunner(job.driver, job.moves, ElasticSettings(workers=2), engine, lambda: now[0])
    job.driver.join(JoinRequest(Role.WORKER, 1, "", "second"))
    job.driver.leave(Role.WORKER, 1, job.driver.view.live(Role.WORKER)[1].incarnation, "")
    await look_for(runner, now, 100)
    assert not engine.asked


@on_job
async def test_the_runner_looks_until_it_is_cancelled(job: Job) -> None:
    runner = ElasticityRunner(job.driver, job.moves, ElasticSettings(), None, lambda: 0.0)
    task = asyncio.create_task(runner.run())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
