"""Optimizers that users have registered run on shards: as in one process, and undone where they raise. Costs 2 s."""

from __future__ import annotations

import pytest
import torch

from ps_protocol.errors import ConfigError, UnsupportedOptimizer
from ps_protocol.model.spec import Consistency, Mode
from ps_server.optimizers import catalog
from ps_worker.model import declare
from tests.end_to_end.training import (
    assert_bitwise,
    assert_close,
    batches,
    concatenated,
    loss_of,
    net,
    run_workers,
    train_alone,
    values,
)
from tests.optimizers.test_contract import lion
from tests.support import user_optimizers as users
from tests.worker.jobs import running_job

SYNC = Consistency(Mode.SYNC)


def train(cluster, optimizer, model, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step[cluster.rank]).backward()
        optimizer.step()
    return values(model)


@pytest.mark.parametrize(
    ("torch_class", "arguments"),
    [
        (lion(), {"lr": 0.01, "weight_decay": 0.1}),
        (users.Damped, {"lr": 0.1, "damp": 0.25}),
        (users.Counting, {"lr": 0.1}),
        (users.NormedRows, {"lr": 0.1}),
    ],
)
def test_in_sync_it_is_as_in_one_process(torch_class, arguments):
    steps = batches(8, 2)

    def work(cluster):
        model = net(cluster.rank)
        optimizer = cluster.optimizer(torch_class, model, **arguments)
        assert isinstance(optimizer, torch_class)
        return train(cluster, optimizer, model, steps)

    with running_job(2, 2, consistency=SYNC) as job:
        found = run_workers(job, 2, work)
    assert_bitwise(found[0], found[1])
    # An element-wise sign of a mean may be another one where the mean is a rounding error.
    assert_close(found[0], train_alone(net(0), map(concatenated, steps), torch_class, **arguments), 1e-5)


def test_its_state_is_saved_restored_and_adopted_as_that_of_torch():
    steps = batches(6)
    plain = net(0)
    reference = lion()(plain.parameters(), lr=0.01)
    for step in steps[:3]:
        reference.zero_grad()
        loss_of(plain, step[0]).backward()
        reference.step()

    def work(cluster):
        model = net(0)
        model.load_state_dict(plain.state_dict())
        built = lion()(model.parameters(), lr=0.01)
        built.load_state_dict(reference.state_dict())
        optimizer = cluster.adopt(built, model)
        saved = optimizer.state_dict()
        for number, state in reference.state_dict()["state"].items():
            torch.testing.assert_close(saved["state"][number]["exp_avg"], state["exp_avg"])
        return train(cluster, optimizer, model, steps[3:])

    with running_job(2, 1) as job:
        (found,) = run_workers(job, 1, work)
    for step in steps[3:]:
        reference.zero_grad()
        loss_of(plain, step[0]).backward()
        reference.step()
    assert_close(found, values(plain))


def test_a_shard_that_lacks_it_says_so_with_the_remedy(monkeypatch):
    monkeypatch.setattr(catalog, "registered_optimizer", lambda name: None)

    def work(cluster):
        with pytest.raises(UnsupportedOptimizer, match=r"not registered on this shard.*--optimizers"):
            cluster.optimizer(users.Descent, net(), lr=0.1)

    with running_job(1, 1) as job:
        run_workers(job, 1, work)


def test_a_class_that_nobody_registered_is_refused_by_the_worker_which_looks_for_it(monkeypatch):
    def work(cluster):
        with pytest.raises(UnsupportedOptimizer, match=r"register one of your own"):
            cluster.optimizer(users.Plain, net(), lr=0.1)
        monkeypatch.setenv("PS_OPTIMIZERS", "nowhere_at_all")
        with pytest.raises(ConfigError, match="nowhere_at_all cannot be imported"):
            declare.qualified_name(users.Plain)

    with running_job(1, 1) as job:
        run_workers(job, 1, work)


def test_a_class_that_breaks_the_contract_is_refused_when_it_is_declared():
    def work(cluster):
        with pytest.raises(UnsupportedOptimizer, match="'k' changed"):
            cluster.optimizer(users.CountsInGroups, net(), lr=0.1)

    with running_job(1, 1) as job:
        run_workers(job, 1, work)


def test_a_step_of_it_that_raises_is_undone_and_the_job_goes_on():
    def work(cluster):
        model = net()
        optimizer = cluster.optimizer(users.Raises, model, lr=0.1)
        before = values(model)
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        parameters[-1].grad.fill_(1000.0)
        with pytest.raises(UnsupportedOptimizer, match="too steep"):
            optimizer.step()
        optimizer.pull()
        assert_bitwise(values(model), before)
        parameters[-1].grad.fill_(1.0)
        optimizer.step()
        return values(model), before

    with running_job(1, 1) as job:
        ((after, before),) = run_workers(job, 1, work)
    assert_close(after, [value - 0.1 for value in before])
