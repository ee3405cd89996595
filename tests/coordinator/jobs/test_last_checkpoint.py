"""Whether the last checkpoint of a job was written: what a coordinator says with its exit code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ps_protocol.cluster.view import ClusterView
from ps_protocol.errors import NotReady, PsError, StorageFull, Unavailable
from ps_protocol.model.spec import Mode
from ps_server.cli.options.checkpoint import CheckpointConfig
from ps_server.coordinator.divergence import DivergenceWatch
from ps_server.coordinator.event_log import EventLog
from ps_server.coordinator.jobs import checkpoints
from ps_server.coordinator.jobs.checkpoints import Checkpoints

FULL = StorageFull("the disk is full")
RUNS = ClusterView(models={"net": 1}, started=True)
FINISHED = replace(RUNS, finished=True)


class Job(Checkpoints):
    """Attempts end as they are told; without a word, they succeed."""

    def __init__(self, folder: Path, *outcomes: PsError | None, seconds: float | None = None) -> None:
        self.view = RUNS
        driver: Any = SimpleNamespace(events=EventLog(), divergence=DivergenceWatch(Mode.ASYNC))
        driver.__dict__["view"] = RUNS
        super().__init__(driver, CheckpointConfig(folder, seconds))
        self.driver, self.outcomes, self.attempts = driver, list(outcomes), 0
        #: An attempt under way ends when this is set.
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    def is_now(self, view: ClusterView) -> None:
        self.driver.view = view

    async def _tried(self, directory: Path) -> tuple[Path, int, int]:
        self.attempts += 1
        await self.goes_on.wait()
        if (error := self.outcomes.pop(0) if self.outcomes else None) is not None:
            raise error
        return directory, 1, 7


async def until(true: Any) -> None:
    for _ in range(60_000):
        if true():
            return
        await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_server.coordinator.times.LOOK_SECONDS", 0.001)
    monkeypatch.setattr(checkpoints, "prune", lambda *of: [])


async def finished(folder: Path, *outcomes: PsError | None) -> Job:
    """A job that is stopped when it has settled after its end."""
    job = Job(folder, *outcomes)
    running = asyncio.create_task(job.run())
    job.is_now(FINISHED)
    await until(lambda: job.attempts and job.settled)
    job.stop()
    await running
    return job


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), 60.0))

    return run


@in_loop
async def test_a_job_that_is_stopped_and_cannot_be_saved_says_why(tmp_path: Path) -> None:
    job = Job(tmp_path, FULL)
    job.stop()
    await job.run()
    assert job.unsaved is FULL


@in_loop
async def test_after_a_failure_at_the_end_of_the_job_there_is_another_attempt_at_the_stop(tmp_path: Path) -> None:
    job = await finished(tmp_path, FULL)
    assert (job.attempts, job.unsaved) == (2, None)
    job = await finished(tmp_path, FULL, FULL)
    assert (job.attempts, job.unsaved) == (2, FULL)
    # One that was written is enough.
    job = await finished(tmp_path)
    assert (job.attempts, job.unsaved) == (1, None)


@in_loop
async def test_a_shard_that_is_away_at_the_end_of_the_job_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = Unavailable("shard 0 does not answer")
    job = await finished(tmp_path, away, NotReady("a shard is missing"), None)
    assert (job.attempts, job.unsaved) == (3, None)
    # For a while; then there is the attempt at the stop.
    monkeypatch.setattr("ps_server.coordinator.times.LAST_CHECKPOINT_SECONDS", 0.0)
    job = await finished(tmp_path, away, away)
    assert (job.attempts, job.unsaved) == (2, away)


@in_loop
async def test_a_stop_in_the_middle_of_an_attempt_is_followed_by_a_last_one(tmp_path: Path) -> None:
    job = Job(tmp_path, None, FULL, seconds=0.001)
    job.goes_on.clear()
    running = asyncio.create_task(job.run())
    await until(lambda: job.attempts == 1)
    job.stop()
    job.goes_on.set()
    await running
    assert (job.attempts, job.unsaved) == (2, FULL)


@in_loop
async def test_a_failure_in_the_middle_of_the_job_and_nothing_to_write_are_no_failure_of_the_last(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path, FULL, NotReady("a shard is missing"), seconds=0.001)
    running = asyncio.create_task(job.run())
    await until(lambda: job.attempts > 2)
    assert job.unsaved is None
    job.stop()
    await running
    assert job.unsaved is None
    job = Job(tmp_path)
    job.is_now(replace(RUNS, models={}))
    job.stop()
    await job.run()
    assert (job.attempts, job.unsaved) == (0, None)


@in_loop
async def test_a_missing_shard_leaves_the_job_unsaved_and_models_without_values_do_not(tmp_path: Path) -> None:
    missing = NotReady("a shard is missing")
    job = Job(tmp_path, missing)
    job.stop()
    await job.run()
    assert job.unsaved is missing
    job = Job(tmp_path, NotReady("no model has values yet"))
    job._nothing = True
    job.stop()
    await job.run()
    assert job.unsaved is None
