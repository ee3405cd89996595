"""Each metric of the coordinator moves when its cause happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import ps_worker
from ps_protocol.cluster.leases import LeaseAsk
from ps_protocol.cluster.view import Joined, JoinRequest, Member, MemberStats, Role, UpdateCounts
from ps_protocol.cluster.weights import PublishAsk
from ps_protocol.errors import Fenced, NotReady, PsError, StorageFull
from ps_protocol.metrics.definition import HistogramValue
from ps_protocol.metrics.server import Target
from ps_protocol.model.spec import Consistency, Mode
from ps_server.cli.options.checkpoint import CheckpointConfig
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.jobs.checkpoints import Checkpoints
from ps_server.coordinator.jobs.move_runner import MoveRunner
from ps_server.coordinator.jobs.publish_runner import PublishRunner
from ps_server.coordinator.metrics import CoordinatorMetrics, targets
from ps_server.coordinator.placement.move_plan import MoveRequest
from ps_server.coordinator.settings import ClusterSettings
from ps_server.limits import LimitCounts
from tests.coordinator.moving_job import SLICE_BYTES, played
from tests.coordinator.moving_job import Job as MovingJob
from tests.support.shards import wait_until
from tests.worker.jobs import running_job

Found = dict[tuple[str, ...], float]


class Job:
    """A driver whose clock the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        settings = ClusterSettings(expected_workers=2, lease_seconds=5.0)
        self.driver = Driver(settings, lambda: self.now)
        checkpoints = Checkpoints(self.driver, CheckpointConfig())
        moves = MoveRunner(self.driver, checkpoints.busy)
        self.limits = LimitCounts()
        self.metrics = CoordinatorMetrics(self.driver, checkpoints, moves, self.limits)

    def read(self) -> Found:
        """By name without prefix and by labels; of a histogram the sum."""
        found = {}
        for sample in self.metrics.read():
            value = sample.value
            number = value.sum if isinstance(value, HistogramValue) else float(value)
            found[sample.metric.name.removeprefix("torch_ps_"), *sample.labels] = number
        return found

    def join(self, role: Role, index: int, *, take_over: bool = False) -> Joined:
        address = "host:1" if role is Role.SHARD else ""
        token = f"{role.value} {index} {self.now}"
        return self.driver.join(JoinRequest(role, index, address, token, take_over=take_over))

    def beat(self, member: Member, stats: MemberStats) -> None:
        self.driver.heartbeat(member.role, member.index, member.incarnation, stats)


async def joins(job: Job) -> None:
    job.join(Role.SHARD, 0)
    job.join(Role.WORKER, 0)
    job.join(Role.WORKER, 1)


async def repeats(job: Job) -> None:
    job.join(Role.WORKER, 0)
    job.join(Role.WORKER, 0)


async def is_silent(job: Job) -> None:
    job.join(Role.WORKER, 0)
    job.driver.start()
    job.now += 6.0
    async for view in job.driver.views(0):
        if not view.members:
            return


async def is_fenced(job: Job) -> None:
    old = job.join(Role.WORKER, 0).member
    job.now += 1.0
    job.join(Role.WORKER, 0, take_over=True)
    with pytest.raises(Fenced):
        job.beat(old, MemberStats())


async def train(job: Job) -> None:
    for rank, clock in enumerate((7, 4)):
        job.beat(job.join(Role.WORKER, rank).member, MemberStats(phase=1, clock=clock))


async def diverges(job: Job) -> None:
    shard, worker = job.join(Role.SHARD, 0).member, job.join(Role.WORKER, 0).member
    for norm in [1.0] * 20 + [1e3] * 2:
        job.now += 1.0
        job.beat(shard, MemberStats(updates=(UpdateCounts("m", norm, 3.0, 7.0),)))
    job.beat(worker, MemberStats(nonfinite=1))


async def loads(job: Job) -> None:
    job.beat(job.join(Role.SHARD, 0).member, MemberStats(activity="placing"))


async def meets(job: Job) -> None:
    await joins(job)
    first, second = (job.driver.view.live(Role.WORKER)[rank].incarnation for rank in (0, 1))
    waits = asyncio.create_task(job.driver.barrier(0, first, 0, 30.0))
    await asyncio.sleep(0)  # it arrives
    job.now += 3.0
    assert (await job.driver.barrier(1, second, 0, 30.0)).released
    assert (await waits).released
    # A repeated call, whose answer was lost, is not counted again.
    job.now += 50.0
    assert (await job.driver.barrier(0, first, 0, 30.0)).released


async def changes_mode(job: Job) -> None:
    job.driver.set_consistency(Consistency(Mode.SYNC))
    job.driver.set_consistency(Consistency(Mode.SYNC))


async def leases(job: Job) -> None:
    worker = job.join(Role.WORKER, 0).member
    await job.driver.lease_data(0, worker.incarnation, LeaseAsk("data", 100, 0, lease_items=10, sequence=1), 0.0)


async def finishes(job: Job) -> None:
    await joins(job)
    for member in list(job.driver.view.live(Role.WORKER).values()):
        job.driver.leave(member.role, member.index, member.incarnation, "")


@dataclass(frozen=True)
class Cause:
    """What happens in a job, and what it adds to which metrics."""

    act: Callable[[Job], Coroutine[Any, Any, None]]
    adds: dict[tuple[str, ...], float] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.act.__name__


CAUSES = [
    Cause(
        joins,
        {
            ("incarnations_total", "shard"): 1,
            ("incarnations_total", "worker"): 2,
            ("members", "worker", "live"): 2,
            ("members", "shard", "live"): 1,
            ("job_started",): 1,
            ("view_revision",): 3,
        },
    ),
    Cause(repeats, {("incarnations_total", "worker"): 1, ("members", "worker", "live"): 1}),
    Cause(
        is_silent,
        {("lease_expirations_total", "worker"): 1, ("lease_expirations_total", "shard"): 0, ("job_started",): 0},
    ),
    Cause(is_fenced, {("fenced_calls_total",): 1, ("incarnations_total", "worker"): 2}),
    Cause(train, {("worker_clock_least",): 4, ("worker_clock_most",): 7}),
    Cause(loads, {("members", "shard", "busy"): 1, ("members", "shard", "live"): 0}),
    Cause(meets, {("phase",): 1, ("barrier_wait_seconds",): 3}),
    Cause(diverges, {("divergences", "shard"): 1, ("divergences", "worker"): 1, ("divergences_total",): 2}),
    Cause(changes_mode, {("mode_changes_total",): 1}),
    Cause(finishes, {("job_finished",): 1, ("lease_expirations_total", "worker"): 0}),
    Cause(leases, {("data_leases",): 1, ("data_leased_items",): 10}),
]


@pytest.mark.parametrize("cause", CAUSES, ids=str)
def test_a_cause_moves_its_metrics(cause: Cause) -> None:
    async def run() -> None:
        job = Job()
        before = job.read()
        await cause.act(job)
        after = job.read()
        await job.driver.close()
        assert {name: after.get(name, 0.0) - before.get(name, 0.0) for name in cause.adds} == cause.adds

    asyncio.run(run())


def test_the_mode_is_a_label_and_heartbeats_have_an_age() -> None:
    job = Job()
    assert job.read()["job_info", "async", "async"] == 1
    job.join(Role.SHARD, 0)
    job.now += 2.5
    found = job.read()
    assert found["heartbeat_age_seconds", "shard"] == 2.5
    assert found["job_finished",] == 0
    assert (found["members_expected", "shard"], found["members_expected", "worker"]) == (1, 2)


def test_targets_are_the_live_members_that_told_an_address() -> None:
    job = Job()
    shard = job.join(Role.SHARD, 0).member
    job.beat(job.join(Role.WORKER, 1).member, MemberStats())
    job.beat(shard, MemberStats(metrics_address="10.0.0.1:9"))
    assert targets(job.driver.status()) == [Target("10.0.0.1:9", "shard")]
    job.driver.leave(shard.role, shard.index, shard.incarnation, "")
    assert targets(job.driver.status()) == []


def read_of(driver: Driver, checkpoints: Checkpoints, moves: MoveRunner) -> Found:
    """As ``Job.read``, of histograms how many values they have."""
    return counted(CoordinatorMetrics(driver, checkpoints, moves, LimitCounts()))


def counted(metrics: CoordinatorMetrics) -> Found:
    found = {}
    for sample in metrics.read():
        value = sample.value
        number = float(sum(value.counts)) if isinstance(value, HistogramValue) else float(value)
        found[sample.metric.name.removeprefix("torch_ps_"), *sample.labels] = number
    return found


def added(before: Found, after: Found) -> Found:
    """What moves and checkpoints have added."""
    names = ("moves_total", "move_pause_seconds", "checkpoints_total", "checkpoint_seconds")
    return {
        name: number - before[name] for name, number in after.items() if name[0] in names and number != before[name]
    }


def test_batches_that_were_moved_and_one_that_was_given_up_are_counted() -> None:
    async def body(job: MovingJob) -> None:
        before = read_of(job.driver, job.checkpoints, job.moves)
        await job.reshard(MoveRequest(to=(2,)), SLICE_BYTES)
        moved = read_of(job.driver, job.checkpoints, job.moves)
        assert added(before, moved) == {("moves_total", "done"): 2, ("move_pause_seconds",): 2}
        job.shards[0].fails["Pause"].append(StorageFull("the disk is full", shard="0"))
        with pytest.raises(StorageFull):
            await job.reshard(MoveRequest(drain=(2,)))
        failed = read_of(job.driver, job.checkpoints, job.moves)
        assert added(moved, failed) == {("moves_total", "failed"): 1}

    played(body)


def test_checkpoints_are_counted_by_result_and_have_a_duration_and_an_age(tmp_path: Path) -> None:
    """With one real shard and worker in this process: about a second."""
    with running_job(checkpoints=CheckpointConfig(tmp_path / "checkpoints")) as job:
        with pytest.raises(NotReady):
            job.loop.run(job.checkpoints.make())
        weights = [torch.nn.Parameter(torch.zeros(3))]
        job.cluster().optimizer(torch.optim.SGD, weights, lr=1.0)
        driver, checkpoints = job.checkpoints._driver, job.checkpoints
        moves = MoveRunner(driver, checkpoints.busy)

        def found() -> Found:
            async def on_loop() -> Found:
                return read_of(driver, checkpoints, moves)

            return job.loop.run(on_loop())

        before = found()
        assert before["checkpoints_total", "failed"] == 1
        assert ("checkpoint_age_seconds",) not in before
        job.loop.run(checkpoints.make())
        made = found()
        assert added(before, made) == {("checkpoints_total", "done"): 1, ("checkpoint_seconds",): 1}
        assert 0 <= made["checkpoint_age_seconds",] < 60
        wait_until(lambda: found()["checkpoint_age_seconds",] > made["checkpoint_age_seconds",])
        # A file where the folder should be: nothing can be begun there.
        (tmp_path / "file").touch()
        checkpoints._config = CheckpointConfig(tmp_path / "file")
        with pytest.raises(PsError):
            job.loop.run(checkpoints.make())
        failed = found()
        assert added(made, failed) == {("checkpoints_total", "failed"): 1}
        assert failed["checkpoint_age_seconds",] > made["checkpoint_age_seconds",], "that of the last complete one"


def test_published_versions_are_counted_and_their_readers_by_how_far_they_are_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one real shard, worker and reader in this process: about a second."""
    # The reader would map the version, and receive nothing of it.
    monkeypatch.setenv("PS_TRANSPORT", "bulk")
    with running_job() as job:
        driver, checkpoints = job.checkpoints._driver, job.checkpoints
        moves, publishing = MoveRunner(driver, checkpoints.busy), PublishRunner(driver, checkpoints.busy)
        metrics = CoordinatorMetrics(driver, checkpoints, moves, LimitCounts(), publishing)
        job.cluster().optimizer(torch.optim.SGD, [torch.nn.Parameter(torch.zeros(3))], lr=1.0)
        worker = job.member(Role.WORKER, 0).member

        async def read() -> Found:
            return counted(metrics)

        async def publish(step: int) -> Found:
            ask = PublishAsk("policy", "model", step, "", 8, f"{step}")
            with suppress(PsError):
                async for _ in publishing.publish(worker.index, worker.incarnation, ask):
                    pass
            return counted(metrics)

        first = job.loop.run(publish(1))
        assert (first["weights_versions_total", "done"], first["weights_publish_seconds",]) == (1, 1)
        assert (first["weights_newest_version", "policy"], first["weights_readers", "policy"]) == (1, 0)
        with ps_worker.subscribe("policy", coordinator=job.address, have=1) as versions:
            job.loop.run(publish(2))
            next(versions)
            job.stop_shard(0)
            last = job.loop.run(publish(3))
            versions._reader.check(60.0)
            told = job.loop.run(read())
        received = {form: told["weights_received_bytes", "policy", form] for form in ("delta", "full", "saved")}
        assert received == {"delta": 0, "full": 12, "saved": 0}
        assert (last["weights_readers", "policy"], last["weights_behind_versions", "policy"]) == (1, 1)
        assert (last["weights_versions_total", "done"], last["weights_versions_total", "failed"]) == (2, 1)


def test_moves_and_checkpoints_begin_at_zero_and_a_checkpoint_without_a_folder_is_none_made() -> None:
    found = Job().read()
    for result in ("done", "failed"):
        assert (found["moves_total", result], found["checkpoints_total", result]) == (0, 0)
    assert ("checkpoint_age_seconds",) not in found
