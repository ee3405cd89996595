"""psctl lr: the learning rates that the steps of a running job are made with."""

from __future__ import annotations

import json

import torch
from click.testing import CliRunner, Result

from ps_server.cli.psctl.main import main
from ps_worker import rows
from tests.worker.jobs import Job, running_job


def psctl(job: Job, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["--coordinator", job.address, "lr", *arguments])


def step(optimizer: torch.optim.Optimizer, *parameters: torch.nn.Parameter) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_each_group_shows_the_rate_of_the_last_step_and_follows_a_schedule() -> None:
    with running_job(shards=2, workers=1) as job, job.cluster() as cluster:
        one, two = (torch.nn.Parameter(torch.zeros(8)) for _ in range(2))
        groups = [{"params": [one]}, {"params": [two], "lr": 0.01}]
        optimizer = cluster.optimizer(torch.optim.SGD, groups, lr=0.1, name="net")
        assert psctl(job).output == "net: no step since its shards began\n"
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        step(optimizer, one, two)
        assert psctl(job).output == "net group 0: 0.1\nnet group 1: 0.01\n"
        schedule.step()
        step(optimizer, one, two)
        assert json.loads(psctl(job, "--json").output) == {
            "models": [{"model": "net", "version": 2, "groups": [0.05, 0.005], "tables": {}}]
        }


def test_a_table_shows_its_own_rate() -> None:
    with running_job(shards=2, workers=1) as job, job.cluster() as cluster:
        bag = cluster.embedding_bag(4, name="ads", optimizer=rows.Adagrad(lr=0.25))
        top = torch.nn.Linear(4, 1)
        optimizer = cluster.optimizer(torch.optim.SGD, torch.nn.Sequential(bag, top), lr=0.5)
        top(bag(torch.arange(32)[:, None])).sum().backward()
        optimizer.step()
        assert psctl(job).output == "model: 0.5\nmodel table ads: 0.25\n"


def test_one_of_several_models_is_chosen_and_an_unknown_one_is_refused() -> None:
    with running_job(shards=1, workers=1) as job, job.cluster() as cluster:
        for name, rate in (("critic", 0.5), ("net", 0.25)):
            parameter = torch.nn.Parameter(torch.zeros(2))
            step(cluster.optimizer(torch.optim.SGD, [parameter], lr=rate, name=name), parameter)
        assert psctl(job).output == "critic: 0.5\nnet: 0.25\n"
        assert psctl(job, "--model", "net").output == "net: 0.25\n"
        refused = psctl(job, "--model", "other")
        assert refused.exit_code == 1
        assert "the job has no model 'other'; expected: critic, net; actual: other" in refused.output
    with running_job(workers=0) as job:
        assert psctl(job).output == "no model has been declared\n"
