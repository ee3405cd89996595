"""What members tell of themselves: positions of workers, what shards hold."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from ps_protocol.cluster.view import MemberStatus, Role
from ps_server.cli.options.storage import Durability, SnapshotRule, StorageConfig
from ps_server.shard.counters import Counters, StepTimes
from ps_server.shard.metrics import shard_stats
from tests.support.shards import StubStream, flat, gradients, running_shard, start, wait_until
from tests.worker.jobs import Job, running_job


def told(job: Job, role: Role) -> MemberStatus:
    return job.member(role, 0)


def test_a_worker_tells_its_phase_and_the_clock_of_its_last_push() -> None:
    with running_job(1) as job:
        cluster = job.cluster()
        model = nn.Linear(3, 2)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)

        def step() -> None:
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()

        for _ in range(3):
            step()
        wait_until(lambda: (told(job, Role.WORKER).stats.phase, told(job, Role.WORKER).stats.clock) == (0, 3))
        cluster.barrier()
        step()
        wait_until(lambda: (told(job, Role.WORKER).stats.phase, told(job, Role.WORKER).stats.clock) == (1, 1))


def test_a_shard_tells_what_it_holds_and_over_what_it_is_used() -> None:
    with running_job(1) as job:
        cluster = job.cluster(transport="bulk")
        model = nn.ModuleList([nn.Linear(3, 2), cluster.embedding_bag(4, name="ads", mode="sum")])
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        (model[0](torch.ones(1, 3)).sum() + model[1](torch.tensor([[5, 6, 7]])).sum()).backward()
        optimizer.step()
        wait_until(lambda: told(job, Role.SHARD).stats.tables != () and told(job, Role.SHARD).stats.tables[0].rows == 3)
        stats = told(job, Role.SHARD).stats
        (table,) = stats.tables
        assert (table.model, table.table, table.rows, table.inserted, table.evicted) == ("model", "ads", 3, 3, 0)
        assert table.size_bytes >= 3 * 4 * 4
        assert stats.streams == {"bulk": 1}
        assert stats.held_bytes >= (3 * 2 + 2) * 4
        assert stats.log is None
        job.stop_shards()
        wait_until(lambda: told(job, Role.SHARD).gone != "")
        gone = told(job, Role.SHARD).stats
        assert (gone.tables, gone.streams, gone.held_bytes) == ((), {}, 0)


@pytest.mark.parametrize("finite", [True, False])
def test_a_shard_tells_how_many_pushes_waited_for_their_turn(finite: bool) -> None:
    """``finite``: the workers have checked the gradients; else that waits for its turn, too."""
    with running_shard({0: 1, 1: 2}) as shard:
        model, _ = start(shard)
        streams = [StubStream(shard), StubStream(shard, rank=1, incarnation=2)]
        shard_stats(shard.counters, shard.registry)
        release, executor = threading.Event(), shard.registry.context.executor

        async def occupy() -> None:
            executor.submit(lambda: release.wait(60.0), 1 << 62)

        shard.loop.run(occupy())
        try:
            for seed, stream in enumerate(streams):
                stream.push(flat(model.layout, *gradients(model, seed)), finite=finite)
            wait_until(lambda: executor.queued == 3)
        finally:
            release.set()
        for stream in streams:
            stream.result()
        waited = model.times.queued
        stats = shard_stats(shard.counters, shard.registry)
        assert 0.0 < stats.queued_pushes <= 2.0
        assert stats.queued_bytes == pytest.approx(stats.queued_pushes * model.layout.region_bytes)
        # What is done waits no more.
        assert shard_stats(shard.counters, shard.registry).queued_pushes == 0.0
        assert model.times.queued == waited
        for stream in streams:
            stream.end()


def test_a_model_that_is_released_takes_its_queue_along() -> None:
    counters = Counters()
    counters.stats([StepTimes(queued=5.0, queued_bytes=10.0), StepTimes(queued=1.0)])
    stats = counters.stats([StepTimes(queued=1.0)])
    assert (stats.queued_pushes, stats.queued_bytes) == (0.0, 0.0)


def test_a_shard_tells_of_its_log_and_its_last_snapshot(tmp_path: Path) -> None:
    config = StorageConfig(data_dir=tmp_path, durability=Durability.DURABLE, snapshots=SnapshotRule(seconds=0.0))
    with running_shard(storage_config=config) as shard:
        assert shard.storage is not None
        model, _ = start(shard)
        stream = StubStream(shard)
        before = shard.storage.counts
        assert before is not None
        stream.exchange(flat(model.layout, *gradients(model, 1)))
        wait_until(lambda: (now := shard.storage.counts) is not None and now.snapshot_age_seconds is not None)
        after = shard.storage.counts
        assert after is not None
        assert after.records > before.records
        assert after.written_bytes > before.written_bytes
        assert after.unsaved_bytes <= after.written_bytes
        stats = shard_stats(shard.counters, shard.registry)
        assert stats.streams == {"grpc": 1}
        stream.end()
