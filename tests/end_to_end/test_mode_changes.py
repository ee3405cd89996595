"""A change of the mode begins at one point of all shards: no push is decided by two modes."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import defaultdict
from typing import Any

import pytest
import torch

from ps_protocol.cluster.view import ClusterView
from ps_protocol.errors import NotReady
from ps_protocol.model.spec import Consistency
from ps_server.consistency import Tracker
from ps_server.coordinator.jobs import mode_runner
from ps_server.coordinator.jobs.mode_runner import ModeRunner
from ps_server.coordinator.jobs.quiesce import QuiesceLost
from ps_server.shard.registry import Registry
from tests.end_to_end.training import batches, net, run_workers, train
from tests.support.length import few
from tests.support.shards import wait_until
from tests.worker.jobs import running_job

Decided = dict[tuple[Any, int], dict[int, str]]
MODES = ["ssp", "sync", "async"]


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> Decided:
    """By push, the mode in which each shard has decided on it; views come late to one of two shards."""
    found: Decided = defaultdict(dict)
    push, on_view = Tracker.push, Registry.on_view

    def noting(tracker: Tracker, info: Any) -> Any:
        decision = push(tracker, info)
        found[info.worker, info.sequence].setdefault(id(tracker), str(tracker.consistency))
        return decision

    def late(registry: Registry, view: Any) -> None:
        if registry.context.shard == 1:
            asyncio.get_running_loop().call_later(0.05, on_view, registry, view)
        else:
            on_view(registry, view)

    monkeypatch.setattr(Tracker, "push", noting)
    monkeypatch.setattr(Registry, "on_view", late)
    return found


@pytest.mark.parametrize("rank", few([1, 0]))
def test_no_push_is_decided_by_two_modes_while_workers_push_on(decided: Decided, rank: int) -> None:
    over = threading.Event()

    def work(cluster: Any) -> None:
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.01)
        (batch,) = batches(1)[0]
        for step in range(120):
            if cluster.rank == rank and step % 10 == 5:
                change = step // 10
                cluster.set_mode(MODES[change % 3], stale_policy="accept" if change % 3 == 1 else "reject")
            train(model, optimizer, [batch])
        over.set()

    with running_job(2, 3) as job:
        run_workers(job, 3, work)
        assert job.view.consistency == Consistency.of("async", stale_policy="reject")
    assert over.is_set()
    assert len(decided) == 360
    assert {len(modes) for modes in decided.values()} == {2}
    assert [modes for modes in decided.values() if len(set(modes.values())) > 1] == []
    assert len({mode for modes in decided.values() for mode in modes.values()}) == 4


def test_a_mode_waits_for_the_end_of_a_checkpoint_and_says_so_when_it_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running_job(1, 1) as job, job.cluster(rank=0) as cluster:
        cluster.optimizer(torch.optim.SGD, net(), lr=0.01)
        busy = job.checkpoints.busy
        job.loop.run(busy.acquire())
        with monkeypatch.context() as soon:
            soon.setattr("ps_server.coordinator.times.ANSWER_SECONDS", 59.0)
            with pytest.raises(NotReady, match="a checkpoint is made or slices are moved"):
                job.client.set_consistency(Consistency.of("ssp"), 60.0)
        changed = threading.Thread(target=cluster.set_mode, args=("sync",))
        changed.start()
        time.sleep(0.2)  # time for what must not happen
        assert str(job.view.consistency) == "async"
        job.loop.loop.call_soon_threadsafe(busy.release)
        changed.join(30)
        assert str(job.view.consistency) == "sync"


def test_a_mode_that_is_in_force_pauses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_job(1, 1) as job, job.cluster(rank=0) as cluster:
        cluster.optimizer(torch.optim.SGD, net(), lr=0.01)
        revision = job.view.revision
        monkeypatch.setattr("ps_server.coordinator.jobs.mode_runner.quiesced", None)
        cluster.set_mode("async")
        assert job.view.revision == revision


def test_while_a_shard_is_missing_the_mode_stays_and_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_server.coordinator.times.ANSWER_SECONDS", 59.5)
    with running_job(2, 1) as job, job.cluster(rank=0) as cluster:
        cluster.optimizer(torch.optim.SGD, net(), lr=0.01)
        job.stop_shard(1)
        wait_until(lambda: len(job.view.members) == 2)
        with pytest.raises(NotReady, match=r"a shard is missing; shard: 1"):
            job.client.set_consistency(Consistency.of("sync"), 60.0)
        assert str(job.view.consistency) == "async"


def test_between_attempts_training_goes_on_for_longer_than_it_was_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[float] = []

    async def lost(runner: ModeRunner, consistency: Consistency) -> ClusterView:
        began.append(time.monotonic())
        if len(began) == 2:  # There is no time for a third.
            monkeypatch.setattr(mode_runner, "BREATH_PAUSES", math.inf)
        await asyncio.sleep(0.3)  # shards that do not come to one point take so long to say so
        raise QuiesceLost("the shards were not at one point")

    monkeypatch.setattr(ModeRunner, "_make", lost)
    with running_job(1, 0) as job:
        with pytest.raises(NotReady, match="the mode cannot change yet: the shards were not at one point"):
            job.client.set_consistency(Consistency.of("sync"), 60.0)
        assert str(job.view.consistency) == "async"
    assert len(began) == 2
    assert began[1] - began[0] > 1.5
