"""Moves through shards that fail at every step: a batch is made on all of them, or on none, and training goes on."""

import asyncio
from collections import defaultdict
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ps_protocol import retry
from ps_protocol.cluster.view import ClosedModelAsk, MoveProgress, Role
from ps_protocol.errors import NotReady, PsError, StorageFull, Unavailable, UnknownShard
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.jobs.move_runner import MoveRunner
from ps_server.coordinator.jobs.release_runner import ReleaseRunner
from ps_server.coordinator.persistence.journal import Journal
from ps_server.coordinator.placement.move_plan import MoveRequest
from ps_server.coordinator.settings import ClusterSettings
from tests.coordinator.moving_job import SLICE_BYTES, SPEC, Job, on_job, played

FULL = StorageFull("the disk is full", shard="1")
AWAY = Unavailable("lost for a moment")


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "MOVE", replace(retry.MOVE, first_seconds=0.01))
    monkeypatch.setattr("ps_server.coordinator.times.BREATH_SECONDS", 0.0)


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "MOVE", retry.MOVE.within(0.1))


@on_job
async def test_a_new_shard_gets_its_share_batch_by_batch(job: Job) -> None:
    assert job.held == [4, 4, 0]
    progress = await job.reshard(MoveRequest(to=(2,)), SLICE_BYTES)
    assert [(p.moved_bytes, p.total_bytes, p.batches) for p in progress] == [
        (n * SLICE_BYTES, 2 * SLICE_BYTES, n) for n in range(3)
    ]
    assert all(p.pause_seconds > 0 for p in progress[1:])
    assert job.held == [3, 3, 2]
    assert (job.driver.view.models, job.driver.view.spare) == ({"net": 3}, frozenset())
    job.check_all_go_on()
    assert all(shard.sequence == 2 for shard in job.shards[:2])


@on_job
async def test_a_drained_shard_holds_nothing_and_is_spare_and_nothing_is_left_to_do_then(job: Job) -> None:
    *_, last = await job.reshard(MoveRequest(drain=(1,)))
    assert (last.moved_bytes, last.batches) == (4 * SLICE_BYTES, 1)
    assert (job.held, job.driver.view.spare) == ([8, 0, 0], {1, 2})
    assert await job.reshard(MoveRequest(drain=(1,))) == [MoveProgress()]
    await job.shards[1].stop()
    assert job.shards[1].joined
    job.driver.leave(Role.SHARD, 1, job.shards[1].joined.member.incarnation, "stopped")
    await job.reshard(MoveRequest(to=(2,)))
    assert job.held == [4, 0, 4]


@pytest.mark.parametrize("method", ["Pause", "CatchUp", "StageReshard"])
@pytest.mark.parametrize("number", [0, 1, 2])
@on_job
async def test_a_step_that_fails_leaves_all_as_it_was_and_the_next_try_makes_it(
    job: Job, method: str, number: int
) -> None:
    job.shards[number].fails[method] = [FULL]
    before = job.driver.shard_map("net")
    with pytest.raises(StorageFull):
        await job.reshard(MoveRequest(to=(2,)))
    assert job.driver.shard_map("net") is before
    assert job.driver.view.spare == {2}
    job.check_all_go_on()
    await job.reshard(MoveRequest(to=(2,)))
    assert job.held == [3, 3, 2]
    job.check_all_go_on()


@pytest.mark.parametrize("method", ["Pause", "CatchUp", "StageReshard"])
@on_job
async def test_a_loss_that_passes_is_waited_out(job: Job, method: str) -> None:
    job.shards[1].fails[method] = [AWAY, AWAY]
    await job.reshard(MoveRequest(to=(2,)))
    assert job.held == [3, 3, 2]
    job.check_all_go_on()


@on_job
async def test_shards_make_room_before_training_is_paused(job: Job) -> None:
    await job.reshard(MoveRequest(to=(2,)))
    # Also those that get nothing: connections are there before the pause, too.
    for shard in job.shards:
        assert shard.calls[:2] == ["MakeRoom", "Pause"]


@on_job
async def test_a_shard_that_cannot_make_room_ahead_may_have_it_when_the_slices_come(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.shards[2].fails["MakeRoom"] = [FULL]
    with caplog.at_level("INFO"):
        await job.reshard(MoveRequest(to=(2,)))
    assert job.held == [3, 3, 2]
    assert "room for slices could not be made ahead of a move: the disk is full" in caplog.text
    job.check_all_go_on()


@on_job
async def test_a_move_whose_pauses_are_short_goes_on_in_larger_batches(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps_server.coordinator.jobs.move_runner.FIRST_BYTES", SLICE_BYTES)
    monkeypatch.setattr("ps_server.coordinator.times.PAUSE_SECONDS", 1000.0)
    made = await job.reshard(MoveRequest(drain=(0,)))
    # One slice, then two, then the last: a batch of the fake shards is always short enough.
    assert [each.moved_bytes // SLICE_BYTES for each in made] == [0, 1, 3, 4]


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("method", ["Pause", "CatchUp", "StageReshard"])
@on_job
async def test_a_loss_that_stays_is_told_and_training_goes_on(job: Job, method: str) -> None:
    job.shards[0].fails[method] = [AWAY] * 1000
    with pytest.raises(Unavailable, match="lost for a moment"):
        await job.reshard(MoveRequest(to=(2,)))
    assert job.held == [4, 4, 0]
    job.check_all_go_on()


@on_job
async def test_a_shard_that_returns_as_another_process_while_it_prepares_does_not_get_the_map(job: Job) -> None:
    job.shards[1].fails["StageReshard"] = [job.shards[1].join]
    await job.reshard(MoveRequest(to=(2,)))
    assert job.held == [3, 3, 2]
    assert job.shards[0].calls.count("StageReshard") == 2
    job.check_all_go_on()


@on_job
async def test_a_shard_that_does_not_hear_that_it_should_resume_goes_on_by_the_view(job: Job) -> None:
    job.shards[2].fails["StageReshard"] = [FULL]
    job.shards[0].fails["Resume"] = [AWAY]
    with pytest.raises(StorageFull):
        await job.reshard(MoveRequest(to=(2,)))
    job.check_all_go_on()


@on_job
async def test_shards_that_could_not_be_brought_to_one_point_are_tried_again(job: Job) -> None:
    def one_more() -> None:
        job.shards[1].sequence += 5

    job.shards[1].fails["CatchUp"] = [one_more]
    await job.reshard(MoveRequest(to=(2,)))
    assert job.shards[0].calls.count("CatchUp") == 2
    assert job.held == [3, 3, 2]


@pytest.mark.usefixtures("_impatient")
@on_job
async def test_a_model_without_values_waits_and_then_says_so(job: Job) -> None:
    job.shards[1].empty = {"net"}
    with pytest.raises(NotReady, match="model 'net' has no values yet"):
        await job.reshard(MoveRequest(to=(2,)))
    assert job.held == [4, 4, 0]
    job.check_all_go_on()


@on_job
async def test_what_a_spare_shard_has_of_the_model_does_not_matter(job: Job) -> None:
    job.shards[2].empty, job.shards[2].sequence = {"net"}, 77
    await job.reshard(MoveRequest(to=(2,)))
    assert job.held == [3, 3, 2]


@on_job
async def test_a_model_that_is_declared_while_shards_are_drained_leaves_them_too(job: Job) -> None:
    later = replace(SPEC, name="later")
    job.shards[0].fails["Pause"] = [lambda: job.declare(later)]
    *_, last = await job.reshard(MoveRequest(drain=(1,)))
    assert last.total_bytes == last.moved_bytes == 8 * SLICE_BYTES
    assert job.driver.shard_map("later").holders == [0]
    assert job.driver.view.spare == {1, 2}


@on_job
async def test_two_at_a_time_are_refused(job: Job) -> None:
    async with aclosing(job.moves.reshard(MoveRequest(to=(2,)))) as first:
        await anext(first)
        with pytest.raises(NotReady, match="moved already"):
            await job.reshard(MoveRequest(drain=(0,)))
        async for _ in first:
            pass
    await job.reshard(MoveRequest(drain=(0,)))


@on_job
async def test_a_request_that_cannot_be_fulfilled_disturbs_nobody(job: Job) -> None:
    with pytest.raises(UnknownShard):
        await job.reshard(MoveRequest(to=(3,)))
    assert all(shard.calls == [] for shard in job.shards)
    await job.reshard(MoveRequest(to=(2,)))


@on_job
async def test_a_batch_waits_for_another_quiesce_of_the_shards(job: Job) -> None:
    async with job.checkpoints.busy:
        moving = asyncio.create_task(job.reshard(MoveRequest(to=(2,))))
        await asyncio.wait([moving], timeout=0.05)
        assert all(shard.calls == [] for shard in job.shards)
    await moving
    assert job.held == [3, 3, 2]


@on_job
async def test_who_goes_away_ends_it_behind_the_batch_under_way(job: Job) -> None:
    asked = asyncio.Event()
    job.shards[0].fails["StageReshard"] = [asked.set]
    moving = asyncio.create_task(job.reshard(MoveRequest(to=(2,)), SLICE_BYTES))
    await asked.wait()
    moving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await moving
    await job.moves.stop()
    assert sum(job.held[:2]) == 7
    job.check_all_go_on()
    again = MoveRunner(job.driver, job.checkpoints.busy)
    async with aclosing(again.reshard(MoveRequest(to=(2,)))) as made:
        assert [p.batches async for p in made] == [0, 1]
    assert job.held == [3, 3, 2]


@on_job
async def test_a_coordinator_that_stops_begins_no_other_batch(job: Job) -> None:
    async with aclosing(job.moves.reshard(MoveRequest(to=(2,)), SLICE_BYTES)) as made:
        await anext(made)
        await anext(made)
        await job.moves.stop()
        with pytest.raises(Unavailable, match="stopping"):
            await anext(made)
    assert sum(job.held[:2]) == 7
    job.check_all_go_on()


class Refusing:
    """A journal that cannot be written for a while."""

    def __init__(self, journal: Journal) -> None:
        self._write = journal.write
        self.refuses = False
        journal.write = self.write  # type: ignore[method-assign]

    def write(self, rows: Any) -> None:
        if self.refuses:
            raise Unavailable("the journal cannot be written")
        self._write(rows)


def test_a_decision_that_cannot_be_written_down_is_not_told_and_not_taken_back(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        disk = Refusing(journal)

        async def body(job: Job) -> None:
            def fill() -> None:
                disk.refuses = True

            asked = asyncio.Event()
            job.shards[1].fails = defaultdict(list, StageReshard=[fill], GetModel=[asked.set])
            moving = asyncio.create_task(job.reshard(MoveRequest(to=(2,))))
            await asyncio.wait_for(asked.wait(), 60)
            assert job.driver.view.moving
            assert all(shard.bound for shard in job.shards)
            disk.refuses = False
            with pytest.raises(PsError):
                job.driver.shard_map("nothing")
            job.driver.shard_map("net")
            await moving
            assert job.held == [3, 3, 2]
            job.check_all_go_on()

        played(body, journal)


def test_a_coordinator_that_dies_before_it_decides_lets_all_go_on_as_they_were(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:

        async def body(job: Job) -> None:
            asked = asyncio.Event()
            job.shards[0].fails["StageReshard"] = [asked.set]
            moving = asyncio.create_task(job.reshard(MoveRequest(to=(2,))))
            await asked.wait()
            known = job.driver.view
            assert known.moving
            again = Driver(ClusterSettings(expected_shards=2, lease_seconds=600), journal=journal)
            assert again.view.revision > known.revision
            assert (again.view.moving, again.view.models, again.view.spare) == ("", {"net": 1}, {2})
            await moving

        played(body, journal)


@on_job
async def test_a_move_goes_on_without_a_model_that_is_released_between_two_batches(job: Job) -> None:
    job.declare(replace(SPEC, name="other"))
    worker = job.driver.view.live(Role.WORKER)[0]
    releases = ReleaseRunner(job.driver, job.checkpoints.busy)
    async with aclosing(job.moves.reshard(MoveRequest(drain=(1,)), SLICE_BYTES)) as made:
        async for progress in made:
            if progress.batches == 1:
                await releases.close(worker.index, worker.incarnation, ClosedModelAsk("net", 1, release=True), 5.0)
    assert set(job.driver.view.models) == {"other"}
    assert job.driver.view.released_models == {"net": 2}
    assert job.driver.shard_map("other").holders == [0]
    assert progress.moved_bytes == 5 * SLICE_BYTES
    job.check_all_go_on()
