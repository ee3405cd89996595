"""Optimizers that were built before the cluster took them over, on real shards. In one process, about 3 s."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from ps_protocol.errors import ConfigError
from ps_protocol.model.spec import Consistency, Mode
from ps_worker import rows
from tests.end_to_end.training import assert_close, batches, concatenated, loss_of, net, run_workers, values
from tests.worker.jobs import running_job

STEPS = batches(6, workers=2)


def build(model: nn.Module) -> tuple[torch.optim.Optimizer, lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return optimizer, lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)


def train(model, optimizer, scheduler, steps):
    for batch in steps:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.ASYNC])
def test_workers_go_on_from_the_state_that_the_lowest_rank_had(mode):
    model = net()
    optimizer, scheduler = build(model)
    train(model, optimizer, scheduler, map(concatenated, STEPS[:3]))
    saved = model.state_dict(), optimizer.state_dict(), scheduler.state_dict()
    workers = 2 if mode is Mode.SYNC else 1

    def work(cluster):
        own = net(seed=cluster.rank)
        mine, schedule = build(own)
        if cluster.rank == 0:
            own.load_state_dict(saved[0])
            mine.load_state_dict(saved[1])
            schedule.load_state_dict(saved[2])
        else:
            # What another rank has in its place is not used.
            train(own, mine, schedule, [step[1] for step in STEPS[:3]])
        adopted = cluster.adopt(mine, own, [schedule])
        steps = [step[cluster.rank] if workers == 2 else concatenated(step) for step in STEPS[3:]]
        train(own, adopted, schedule, steps)
        return values(own)

    with running_job(2, workers, consistency=Consistency(mode)) as job:
        found = run_workers(job, workers, work)
    train(model, optimizer, scheduler, map(concatenated, STEPS[3:]))
    for own in found:
        assert_close(own, values(model))


def test_a_scheduler_from_before_the_groups_of_tables_is_refused():
    with running_job(1, 1) as job, job.cluster(rank=0) as cluster:
        table = cluster.embedding(4, name="ids", optimizer=rows.SGD(lr=0.1))
        model = nn.Sequential(table, nn.Linear(4, 1))
        optimizer, scheduler = build(model)
        for given in ((), (scheduler,)):
            with pytest.raises(ConfigError, match="before its tables had groups") as caught:
                cluster.adopt(optimizer, model, given)
        assert "after cluster.adopt" in caught.value.remedy
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        adopted = cluster.adopt(optimizer, model)
        scheduler = lr_scheduler.ExponentialLR(adopted, 0.5)
        model(torch.tensor([3, 5])).sum().backward()
        adopted.step()
        scheduler.step()
        assert [group["lr"] for group in adopted.param_groups] == [0.025, 0.05]


def test_adagrad_begins_as_it_was_built():
    model, reference = net(), net()
    plain = torch.optim.Adagrad(reference.parameters(), lr=0.1, initial_accumulator_value=0.1)
    with running_job(2, 1) as job, job.cluster(rank=0) as cluster:
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.1)
        adopted = cluster.adopt(optimizer, model)
        for own, each in ((model, adopted), (reference, plain)):
            for step in STEPS[:3]:
                each.zero_grad()
                loss_of(own, step[0]).backward()
                each.step()
    assert_close(values(model), values(reference))


def test_the_state_of_one_parameter_is_read_from_its_shards():
    with running_job(2, 1) as job, job.cluster(rank=0) as cluster:
        model = nn.Sequential(nn.Linear(64, 300), nn.Linear(300, 3))
        adopted = cluster.adopt(torch.optim.AdamW(model.parameters(), lr=0.05), model)
        model(torch.ones(2, 64)).square().sum().backward()
        adopted.step()
        everything = adopted.state_dict()["state"]
        for number, parameter in enumerate(model.parameters()):
            found = adopted.state[parameter]
            assert found.keys() == everything[number].keys() == {"step", "exp_avg", "exp_avg_sq"}
            assert all(torch.equal(found[name], value) for name, value in everything[number].items())
