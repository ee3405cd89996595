"""Values that a program sets after ``cluster.optimizer(...)`` count as they do in one process, or are an error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ps_protocol.model.spec import Consistency, Mode
from ps_worker.memory import double_buffer, local_writes
from tests.end_to_end.setting import (
    LATE_PROGRAMS,
    PROGRAMS,
    STEPS,
    WEIGHTS,
    Words,
    alone,
    on_cluster,
    share_memory,
    train,
)
from tests.end_to_end.training import assert_bitwise, assert_close, net, run_workers
from tests.end_to_end.training import values as values_of
from tests.support.length import few, paired
from tests.worker.jobs import running_job


@pytest.mark.parametrize("program", PROGRAMS)
def test_with_one_worker_what_is_set_counts_as_in_one_process(program):
    (found,) = on_cluster(program)
    assert_close(found, alone(program))


@pytest.mark.parametrize("program", few(PROGRAMS, 3))
def test_in_sync_what_all_workers_set_alike_counts_as_in_one_process(program):
    # Two workers with the same batches: their mean is one process's gradient.
    found = on_cluster(program, Mode.SYNC, workers=2)
    assert_bitwise(found[0], found[1])
    assert_close(found[0], alone(program))


@pytest.mark.parametrize(("program", "looked_at"), paired(LATE_PROGRAMS, ["sampled", "compared whole"]))
def test_what_is_set_past_torch_in_the_middle_of_training_counts_at_the_very_step(program, looked_at, monkeypatch):
    if looked_at == "sampled":
        monkeypatch.setattr(local_writes, "WHOLE_BYTES", 0)
    wanted = alone(program)
    (found,) = on_cluster(program)
    assert_close(found, wanted)
    found = on_cluster(program, Mode.SYNC, workers=2)
    assert_bitwise(found[0], found[1])
    assert_close(found[0], wanted)


@pytest.mark.parametrize("style", [{}, {"overlap": True}])
def test_parameters_whose_storages_were_moved_train_on(style, monkeypatch):
    monkeypatch.setattr(double_buffer, "LARGE_BYTES", 64)

    def program(model, optimizer):
        share_memory(model, optimizer)
        if style:
            optimizer.finish()
        assert all(p.is_shared() for p in model.parameters())

    # An overlapped step has parameters that lack the last push, which one worker in sync does not.
    (found,) = on_cluster(program, Mode.SYNC, **style)
    assert_close(found, alone(share_memory))
    (found,) = on_cluster(program, **style)
    assert all(not torch.equal(now, then) for now, then in zip(found, values_of(net()), strict=True))


def words(model, optimizer):
    for step in range(5):
        optimizer.zero_grad()
        model.head(model.embedding(torch.tensor([step, (3 * step) % 9]))).square().sum().backward()
        optimizer.step()


def test_rows_that_an_embedding_renormalises_stay_so():
    (found,) = on_cluster(words, make=Words)
    assert_close(found, alone(words, make=Words))


class WithStatistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.norm = net(), nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.net(x))


@pytest.mark.parametrize("steps", [0, 2])
def test_buffers_that_are_set_are_the_clusters_too(steps):
    other = WithStatistics()
    with torch.no_grad():
        other.norm.running_mean.fill_(3)

    def work(cluster):
        model = WithStatistics()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        train(model, optimizer, STEPS[:steps])
        if cluster.rank == 0:
            model.load_state_dict(other.state_dict())
        cluster.barrier()
        return model.state_dict()

    with running_job(2, 2, consistency=Consistency(Mode.SYNC)) as job:
        for found in run_workers(job, 2, work):
            assert all(torch.equal(found[name], value) for name, value in other.state_dict().items())


@pytest.mark.parametrize("mode", [Mode.ASYNC, Mode.SSP])
def test_before_training_the_lowest_ranks_values_are_set_in_every_mode(mode):
    """All ranks load, as every one of these programs does; a batch of no loss then shows what is held."""

    def work(cluster):
        model = net(seed=cluster.rank)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.0)
        model.load_state_dict(WEIGHTS)
        train(model, optimizer, STEPS[:2])
        return values_of(model)

    with running_job(2, 3, consistency=Consistency(mode)) as job:
        for found in run_workers(job, 3, work):
            assert_bitwise(found, list(WEIGHTS.values()))
