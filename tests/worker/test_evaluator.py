"""An evaluator keeps its model at the newest parameters until the job ends."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ps_protocol.cluster.view import Role
from ps_protocol.errors import ConfigError, ModelMismatch, UnknownModel
from ps_worker import Cluster
from tests.support.shards import wait_until
from tests.worker.jobs import running_job


def net(width: int = 3) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1))


def train(cluster: Cluster, model: torch.nn.Module, optimizer: Any, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for name, value in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=0, atol=0, msg=name)


def test_an_evaluator_sees_each_state_and_the_last_one() -> None:
    with running_job(shards=2) as job:
        worker, evaluator = job.cluster(), job.cluster(Role.EVALUATOR)
        trained, copy = net(), net()
        optimizer = worker.optimizer(torch.optim.SGD, trained, lr=0.1)
        steps = evaluator.follow(copy, min_interval_seconds=0.01)
        assert next(steps) == 0
        assert_same(trained, copy)
        train(worker, trained, optimizer, 3)
        assert next(steps) == 3
        optimizer.pull()
        assert_same(trained, copy)
        train(worker, trained, optimizer, 2)
        optimizer.pull()
        worker.close()
        assert list(steps) == [5]
        assert_same(trained, copy)


def test_following_waits_until_the_model_is_declared_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with running_job() as job, ThreadPoolExecutor(1) as threads:
        worker, evaluator = job.cluster(), job.cluster(Role.EVALUATOR)
        first = threads.submit(lambda: next(evaluator.follow(net(), "second")))
        wait_until(lambda: any("to declare model 'second' (so far: none)" in m for m in caplog.messages))
        worker.optimizer(torch.optim.SGD, net(), lr=0.1)
        worker.optimizer(torch.optim.SGD, net(), lr=0.1, name="second")
        assert first.result(60) == 0


def test_following_another_model_names_every_difference() -> None:
    with running_job() as job:
        worker, evaluator = job.cluster(), job.cluster(Role.EVALUATOR)
        worker.optimizer(torch.optim.SGD, torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)), lr=0.1)
        other = torch.nn.Sequential(torch.nn.Linear(2, 5).double(), torch.nn.Identity())
        other.register_parameter("extra", torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)))
        with pytest.raises(ModelMismatch) as caught:
            next(evaluator.follow(other))
        text = str(caught.value)
        assert "'0.weight' has shape (5, 2) instead of (3, 2), dtype float64 instead of float32" in text
        assert "'1.weight' is missing here" in text
        assert "'extra' is not in the declared model" in text


def test_parameter_groups_and_local_buffers_are_followed_by_name() -> None:
    with running_job(shards=2) as job:
        worker, evaluator = job.cluster(), job.cluster(Role.EVALUATOR)
        trained, copy = net(), net()
        named = dict(trained.named_parameters())
        groups = [
            {"params": [(n, p) for n, p in named.items() if n.startswith("2")], "lr": 0.5},
            {"params": [(n, p) for n, p in named.items() if not n.startswith("2")]},
        ]
        worker.optimizer(torch.optim.SGD, groups, lr=0.1)
        assert next(evaluator.follow(copy)) == 0
        for name, value in named.items():
            torch.testing.assert_close(dict(copy.named_parameters())[name], value, rtol=0, atol=0)


def test_a_job_that_ends_without_the_model_is_an_error() -> None:
    with running_job() as job:
        worker, evaluator = job.cluster(), job.cluster(Role.EVALUATOR)
        worker.optimizer(torch.optim.SGD, net(), lr=0.1)
        worker.close()
        with pytest.raises(UnknownModel, match="typo"):
            next(evaluator.follow(net(), "typo"))


def test_models_are_named_by_the_order_of_their_optimizers() -> None:
    with running_job() as job:
        worker = job.cluster()
        names = [worker.optimizer(torch.optim.SGD, net(), lr=0.1).name for _ in range(3)]
        assert names == ["model", "model-1", "model-2"]
        with pytest.raises(ConfigError, match="model-1"):
            worker.optimizer(torch.optim.SGD, net(), lr=0.1, name="model-1")
        assert set(job.view.models) == set(names)
