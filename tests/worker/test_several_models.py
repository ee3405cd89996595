"""Workers with several models who are at different places of their common order do not wait for each other for ever."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from ps_protocol.cluster.view import Role
from ps_protocol.model.spec import Consistency, Mode
from ps_worker import Cluster
from ps_worker.step.shard_calls import ShardClient
from ps_worker.transport.base import Peer
from tests.support.length import paired
from tests.support.shards import wait_until
from tests.worker.jobs import running_job

MODES = [Consistency(Mode.SYNC), Consistency(Mode.SSP, staleness=1), Consistency(Mode.SSP, staleness=0)]


class Worker:
    """Steps models A (0) and B (1) in a given order."""

    def __init__(self, cluster: Cluster, overlap: bool = False) -> None:
        self.cluster = cluster
        self.parameters = [torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2)]
        self.optimizers = [
            cluster.optimizer(torch.optim.SGD, [parameter], lr=1.0, overlap=overlap) for parameter in self.parameters
        ]

    def step(self, *models: int) -> None:
        for model in models:
            self.parameters[model].grad = torch.ones(2, dtype=torch.float64)
            self.optimizers[model].step()

    def skipped(self, model: str) -> int:
        """Empty steps of ``model`` that anybody made."""
        session = self.cluster._session
        calls = ShardClient(session.shard_channel(0), Peer(0, session.shard_address(0)), model, epoch=0)
        return calls.status().outcomes["skipped"]

    def trains(self, models: Sequence[int]) -> threading.Thread:
        """Steps and leaves, in a thread."""

        def train() -> None:
            self.step(*models)
            self.cluster.close()

        thread = threading.Thread(target=train)
        thread.start()
        return thread


def test_status_tells_the_version_of_each_model_that_a_shard_holds() -> None:
    with running_job(shards=2, workers=1) as job:
        worker = Worker(job.cluster())
        worker.step(0, 0, 0, 1)
        single = torch.nn.Parameter(torch.zeros(1))
        single.grad = torch.ones(1)
        worker.cluster.optimizer(torch.optim.SGD, [single], lr=1.0).step()
        both = {"model": 3, "model-1": 1}

        def heard() -> bool:
            told = [job.member(Role.SHARD, number).stats for number in range(2)]
            # A single number is on one shard alone.
            versions = sorted((dict(each.versions) for each in told), key=len)
            return versions == [both, both | {"model-2": 1}] and {each.version for each in told} == {3}

        wait_until(heard)


@pytest.mark.parametrize(("mode", "overlap"), paired(MODES, [True, False]), ids=str)
def test_a_worker_that_joins_in_the_middle_of_an_iteration_finds_its_place(mode: Consistency, overlap: bool) -> None:
    with running_job(shards=2, workers=0, consistency=mode) as job:
        first = Worker(job.cluster(), overlap)
        first.step(0, 1, 0)
        second = Worker(job.cluster(), overlap)
        threads = [first.trains([1, *[0, 1] * 6]), second.trains([0, 1] * 6)]
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)


def test_the_younger_gives_way_until_both_step_the_same_model() -> None:
    """Five steps of A to one of B, joined after two of the five: none after the first iteration."""
    with running_job(workers=0, consistency=Consistency(Mode.SYNC)) as job:
        first = Worker(job.cluster())
        first.step(0, 0)
        second = Worker(job.cluster())
        turn = [0, 0, 0, 0, 0, 1]
        thread = first.trains([0, 0, 0, 1, *turn * 3])
        second.step(*turn * 4)
        thread.join(60)
        assert [second.skipped(model) for model in ("model", "model-1")] == [3, 1]
