"""Training over leases on real shards: uneven ends, death and waiting stop nobody, in any mode."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ps_protocol.model.spec import Consistency, Mode
from ps_worker import Cluster
from tests.end_to_end.training import assert_bitwise, values
from tests.support.length import paired
from tests.support.shards import wait_until
from tests.worker.jobs import Job, running_job, together

ITEMS = 30
MODES = {
    "async": Consistency(Mode.ASYNC),
    "ssp": Consistency(Mode.SSP, staleness=1),
    "sync": Consistency(Mode.SYNC),
}


def training_loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(ITEMS)), batch_size=4, shuffle=True)


class Trainer:
    """One worker: a gradient of 1 per item and a learning rate of 1, so that the parameter counts the items."""

    def __init__(self, cluster: Cluster, models: int = 1, overlap: bool = False) -> None:
        self.cluster = cluster
        self.parameters = [torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(models)]
        self.optimizers = [
            cluster.optimizer(torch.optim.SGD, [parameter], lr=1.0, overlap=overlap) for parameter in self.parameters
        ]
        self.loader = cluster.shard(training_loader())
        self.seen: list[int] = []

    def step(self, batch: Any) -> None:
        self.seen += batch[0].tolist()
        # The last model steps twice for each step of the others.
        for optimizer, parameter in [*zip(self.optimizers, self.parameters, strict=True)][::-1]:
            for _ in range(2 if optimizer is self.optimizers[-1] and len(self.optimizers) > 1 else 1):
                parameter.grad = torch.full_like(parameter, float(len(batch[0])))
                optimizer.step()

    def train(self, epochs: int) -> list[torch.Tensor]:
        for _ in range(epochs):
            for batch in self.loader:
                self.step(batch)
        self.cluster.barrier()
        return [parameter.detach().clone() for parameter in self.parameters]


@pytest.mark.parametrize(("style", "mode"), paired(["one model", "overlap", "two models"], list(MODES)))
def test_epochs_end_for_everyone_whatever_the_shares(mode: str, style: str) -> None:
    with running_job(shards=2, workers=0, consistency=MODES[mode]) as job:
        clusters = [job.cluster(rank=rank) for rank in range(3)]
        models = 2 if style == "two models" else 1
        trainers = together(*(lambda c=c: Trainer(c, models, style == "overlap") for c in clusters))
        found = together(*(lambda t=t: t.train(3) for t in trainers))
        assert sorted(itertools.chain(*(t.seen for t in trainers))) == sorted(list(range(ITEMS)) * 3)
        for parameters in found[1:]:
            assert_bitwise(parameters, found[0])
        if mode == "async" and style == "one model":
            assert found[0][0].eq(-3.0 * ITEMS).all()


@pytest.mark.parametrize("mode", ["ssp", "sync"])
def test_who_waits_for_the_last_items_holds_nobody_back_and_takes_them_when_their_holder_dies(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps_server.coordinator.times.DISCONNECTED_SECONDS", 0.5)
    with running_job(workers=0, consistency=MODES[mode]) as job:
        slow, quick = together(*(lambda r=r: Trainer(job.cluster(rank=r)) for r in range(2)))
        running = iter(slow.loader)
        first = next(running)
        # It has its next lease before there is another worker, which might be thought to be faster.
        wait_until(lambda: slow.loader.leases._feed._ready)
        waiting = threading.Thread(target=lambda: quick.train(1))
        waiting.start()
        # The other waits for the items held here; steps with those must not wait for it.
        slow.step(first)
        before = set(slow.seen)
        next(running)
        slow.cluster._session._membership.close()
        waiting.join(60)
        assert not waiting.is_alive()
        assert before | set(quick.seen) == set(range(ITEMS))
        assert len(quick.seen) == len(set(quick.seen))


def test_after_waiting_a_worker_has_the_parameters_the_others_made(caplog: pytest.LogCaptureFixture) -> None:
    with running_job(workers=0) as job:
        slow, quick = together(*(lambda r=r: Trainer(job.cluster(rank=r)) for r in range(2)))
        running = iter(slow.loader)
        first = next(running)
        waiting = threading.Thread(target=lambda: [quick.step(batch) for batch in quick.loader])
        waiting.start()
        wait_until(lambda: any("waiting for the last items" in message for message in caplog.messages))
        slow.step(first)
        for batch in running:
            slow.step(batch)
        waiting.join(60)
        assert values(torch.nn.ParameterList(quick.parameters))[0].eq(-ITEMS).all()


def test_a_worker_that_joins_a_synchronous_epoch_trains_in_it() -> None:
    with running_job(workers=0, consistency=MODES["sync"]) as job:
        first = Trainer(job.cluster())
        running = iter(first.loader)
        first.step(next(running))
        late = joined(job, first, running)
        for batch in running:
            first.step(batch)
        late.thread.join(60)
        assert not late.thread.is_alive()
        assert sorted(first.seen + late.trainer.seen) == list(range(ITEMS))


class Late:
    """A worker that joins and trains in a thread."""

    trainer: Trainer

    def __init__(self, job: Job) -> None:
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self._train, args=(job,))
        self.thread.start()

    def _train(self, job: Job) -> None:
        with job.cluster() as cluster:
            self.trainer = Trainer(cluster)
            self.ready.set()
            for batch in self.trainer.loader:
                self.trainer.step(batch)


def joined(job: Job, first: Trainer, running: Any) -> Late:
    late = Late(job)
    # A newcomer starts where the slowest stands; nobody has to step for that.
    wait_until(late.ready.is_set)
    wait_until(lambda: first.cluster.world_size == 2)
    return late
