"""Tables with real shards: what torch's own embeddings give, in every mode, on any number of shards."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ps_protocol.model.spec import Consistency, Mode
from ps_worker import Cluster, rows
from tests.end_to_end.table_training import (
    DIM,
    OPTIMIZERS,
    TOP,
    loss_of,
    on_shards,
    read,
    reference,
    steps_of,
    train,
    with_ids,
)
from tests.end_to_end.training import run_workers
from tests.support.length import few
from tests.support.seeds import drawn_seed
from tests.support.shards import wait_until
from tests.worker.jobs import running_job


@pytest.mark.parametrize(
    ("shards", "workers", "consistency"),
    few(
        [
            (3, 2, Consistency(Mode.SYNC)),
            (1, 1, Consistency(Mode.ASYNC)),
            (3, 1, Consistency(Mode.SSP, staleness=1)),
            (2, 2, Consistency(Mode.SYNC)),
        ],
        2,
    ),
)
def test_training_is_torch_s_training_whatever_the_shards_the_optimizer_and_the_mode(
    shards: int, workers: int, consistency: Consistency
) -> None:
    seed = drawn_seed()
    chance = random.Random(seed)
    jobs = [(kind, chance.choice(["sum", "mean", "max"]), chance.random() < 0.5) for kind in OPTIMIZERS]

    def work(cluster: Cluster) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        results = []
        for number, (kind, mode, shared) in enumerate(jobs):
            steps = steps_of(seed + number, 6, workers)
            model = on_shards(cluster, mode, OPTIMIZERS[kind][0], shared)
            optimizer = cluster.optimizer(torch.optim.SGD, model, lr=TOP, name=kind)
            tables = [model.one] if shared else [model.one, model.two]
            first = read(*tables)
            cluster.barrier()
            train(cluster, model, optimizer, [step[cluster.rank] for step in steps])
            cluster.barrier()
            results.append((first, [*read(*tables), *(p.detach().clone() for p in model.top.parameters())]))
        return results

    with running_job(shards, workers, consistency=consistency) as job:
        found = run_workers(job, workers, work)
    for number, (kind, mode, shared) in enumerate(jobs):
        first, last = found[0][number]
        expected = reference(first, mode, kind, shared, steps_of(seed + number, 6, workers))
        print(f"{kind}, {mode}, {'one table' if shared else 'two tables'}")
        for mine, theirs in zip(last, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(other[number][1], last, strict=True))


def test_in_sync_any_number_of_shards_gives_bitwise_the_same_rows() -> None:
    steps = steps_of(5, 5, 2)

    def work(cluster: Cluster) -> list[torch.Tensor]:
        model = on_shards(cluster, "sum", rows.Adam(lr=0.05), shared=False)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=TOP)
        train(cluster, model, optimizer, [step[cluster.rank] for step in steps])
        cluster.barrier()
        return read(model.one, model.two)

    results = []
    for shards in (1, 2, 3):
        with running_job(shards, 2, consistency=Consistency(Mode.SYNC)) as job:
            results.append(run_workers(job, 2, work)[0])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("transport", ["grpc", "bulk", "shm"])
@pytest.mark.parametrize("many", few([40_000, 50]))
def test_rows_travel_by_every_transport_in_messages_and_behind_them(transport: str, many: int) -> None:
    with running_job(2) as job:
        cluster = job.cluster(transport=transport)
        bag = cluster.embedding_bag(8, name="t", mode="sum", optimizer=rows.SGD(lr=1.0))
        model = nn.ModuleList([bag, nn.Linear(300, 100)])
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        ids = torch.arange(many)[:, None] * 31
        before = bag(ids)
        (before.sum() + model[1](torch.ones(1, 300)).sum()).backward()
        optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(bag(ids), before - 1)
        assert {stream.transport for stream in optimizer._model.pipeline.streams} == {transport}


def test_rows_are_asked_for_ahead_under_ssp_and_the_bound_holds_for_them() -> None:
    """Worker 1 stands still: worker 0 may have one step more, and rows of the step behind that wait for it."""
    steps, done = steps_of(3, 4, 1), []

    def work(cluster: Cluster) -> None:
        model = on_shards(cluster, "sum", rows.SGD(lr=0.5), shared=False)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=TOP)
        if cluster.rank == 1:
            wait_until(lambda: len(done) == 1)
            return
        pairs = [(with_ids(one), with_ids(two)) for ((one, two),) in steps]
        for one, two in cluster.prefetch(pairs, lambda pair: {model.one: pair[0][0], model.two: pair[1][0]}):
            optimizer.zero_grad()
            loss_of(model(one, two)).backward()
            optimizer.step()
            done.append(optimizer.last.clock)

    with running_job(2, 2, consistency=Consistency(Mode.SSP, staleness=1)) as job:
        run_workers(job, 2, work)
    assert done == [1, 2, 3, 4]


def test_prefetch_under_sync_trains_as_without_it() -> None:
    steps = steps_of(8, 5, 1)

    def work(cluster: Cluster, ahead: bool) -> list[torch.Tensor]:
        model = on_shards(cluster, "mean", rows.Adagrad(lr=0.5), shared=True)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=TOP)
        pairs: Any = [(with_ids(one), with_ids(two)) for ((one, two),) in steps]
        if ahead:
            pairs = cluster.prefetch(pairs, lambda pair: {model.one: pair[0][0], model.two: pair[1][0]})
        for one, two in pairs:
            optimizer.zero_grad()
            loss_of(model(one, two)).backward()
            optimizer.step()
        return read(model.one)

    results = []
    for ahead in (False, True):
        with running_job(2, consistency=Consistency(Mode.SYNC)) as job:
            results.append(run_workers(job, 1, lambda cluster, ahead=ahead: work(cluster, ahead))[0])
    assert torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("lease", [False, True])
def test_leased_data_is_not_taken_early(lease: bool) -> None:
    """A batch counts as trained when the next one is asked for."""
    taken = []

    def collate(items: list[int]) -> torch.Tensor:
        taken.append(items)
        return torch.tensor(items)[:, None]

    with running_job(1) as job:
        cluster = job.cluster()
        model = nn.ModuleList([cluster.embedding_bag(DIM, name="t", mode="sum")])
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        loader: DataLoader[Any] = DataLoader(range(12), batch_size=3, collate_fn=collate)  # type: ignore[arg-type]
        early = []
        for number, ids in enumerate(cluster.prefetch(cluster.shard(loader, lease=lease), lambda ids: {model[0]: ids})):
            early.append(len(taken) - number - 1)
            model[0](ids).sum().backward()
            optimizer.step()
        assert early == ([0] * 4 if lease else [1, 1, 1, 0])
