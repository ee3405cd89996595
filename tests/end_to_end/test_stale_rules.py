"""Rules for stale gradients, of the job and of a model, with real shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ps_protocol.errors import ConfigError, ModelMismatch, UnsupportedOptimizer
from ps_protocol.model.spec import Consistency
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.directory import committed
from ps_server.cli.options.checkpoint import CheckpointConfig
from ps_worker import Cluster
from ps_worker.optimizer import PsOptimizer
from tests.support.length import few
from tests.worker.jobs import Job, running_job


class Ones(nn.Module):
    """Its gradient is 1 everywhere, wherever it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 4))

    def forward(self) -> Tensor:
        return self.weight.sum()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model().backward()
    optimizer.step()


def declared(cluster: Cluster, *, adopt: bool = False, **options: Any) -> tuple[Ones, PsOptimizer]:
    model = Ones()
    if adopt:
        return model, cluster.adopt(torch.optim.SGD(model.parameters(), lr=1.0), model, **options)
    return model, cluster.optimizer(torch.optim.SGD, model, lr=1.0, **options)


def late_push(job: Job, steps: int = 4, *, adopt: bool = False, **options: Any) -> tuple[float, str]:
    """Worker 1 pulls, worker 0 makes ``steps``, worker 1 pushes: where that brings it, and what became of it."""
    with job.cluster(rank=0) as first, job.cluster(rank=1) as second:
        (model, optimizer), (late, its) = (declared(each, adopt=adopt, **options) for each in (first, second))
        for _ in range(steps):
            step(model, optimizer)
        step(late, its)
        assert its.last is not None
        its.pull()
        assert late.weight.unique().numel() == 1
        return late.weight[0, 0].item() + steps, its.last.outcome.name.lower()


@pytest.mark.parametrize(
    ("of_job", "of_model", "change", "outcome"),
    few(
        [
            ("scale:1", "scale:3", -0.75, "applied"),
            ("accept", "scale", -0.5, "applied"),
            ("scale:1", "reject", 0.0, "stale"),
            ("reject:0", "accept", -1.0, "applied"),
            ("accept", None, -1.0, "applied"),
            ("scale:1", None, -0.25, "applied"),
            ("accept", "scale:1", -0.25, "applied"),
            ("scale:1", "accept", -1.0, "applied"),
        ],
        4,
    ),
)
def test_the_rule_of_a_model_is_over_that_of_the_mode(of_job, of_model, change, outcome):
    policy, _, threshold = of_job.partition(":")
    mode = Consistency.of("async", stale_policy=policy, stale_threshold=int(threshold) if threshold else None)
    with running_job(2, 0, consistency=mode) as job:
        assert late_push(job, stale=of_model) == (change, outcome)
        assert job.client.get_status().stale_rules == (
            {
                "model": {
                    "scale": "scale above the number of workers",
                    "reject": "reject above the number of workers",
                }.get(of_model, of_model.replace(":", " above "))
            }
            if of_model
            else {}
        )


def test_an_optimizer_that_is_adopted_takes_a_rule_too():
    with running_job(2, 0) as job:
        assert late_push(job, adopt=True, stale="scale:2") == (-0.5, "applied")


def test_the_mode_may_change_to_sync_and_back_and_the_model_keeps_its_rule():
    with running_job(2, 0) as job, job.cluster(rank=0) as first, job.cluster(rank=1) as second:
        (model, optimizer), (late, its) = (declared(each, stale="reject:1") for each in (first, second))
        first.set_mode("sync")
        first.set_mode("ssp", staleness=9, stale_policy="scale", stale_threshold=0)
        for _ in range(3):
            step(model, optimizer)
        step(late, its)
        assert its.last is not None
        assert its.last.outcome.name.lower() == "stale"


def test_one_model_has_a_rule_and_another_of_the_job_has_none():
    with running_job(1, 0) as job, job.cluster(rank=0) as first, job.cluster(rank=1) as second:
        pairs = [(declared(each, name="a", stale="scale:1"), declared(each, name="b")) for each in (first, second)]
        for _ in range(4):
            for model, optimizer in pairs[0]:
                step(model, optimizer)
        for late, its in pairs[1]:
            step(late, its)
            its.pull()
        assert [late.weight[0, 0].item() for late, _ in pairs[1]] == [-4.25, -5.0]


def test_a_group_that_is_added_later_has_the_rule_of_its_optimizer():
    with running_job(1, 1) as job, job.cluster(rank=0) as cluster:
        model, more = nn.Linear(2, 2), nn.Linear(2, 2)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1, stale="scale:8")
        optimizer.add_param_group({"params": list(more.parameters())})
        assert set(job.client.get_status().stale_rules.values()) == {"scale above 8"}
        assert len(job.client.get_status().stale_rules) == 2


def test_a_job_that_goes_on_from_a_checkpoint_has_the_rule_of_its_script(tmp_path):
    with (
        running_job(2, 0, checkpoints=CheckpointConfig(tmp_path)) as job,
        job.cluster(rank=0) as cluster,
    ):
        step(*declared(cluster, stale="scale:1"))
        job.client.checkpoint()
    saved = Checkpoint.open(committed(tmp_path)[-1])
    assert str(saved.model("model").shard_map.spec.stale) == "scale above 1"
    with running_job(2, 0, saved=saved) as job:
        assert late_push(job, stale="reject:2") == (-1.0, "stale")
        assert job.client.get_status().stale_rules == {"model": "reject above 2"}


def test_workers_with_different_rules_are_told_of_the_difference():
    with running_job(1, 0) as job, job.cluster(rank=0) as first, job.cluster(rank=1) as second:
        declared(first, stale="scale:8")
        with pytest.raises(ModelMismatch, match="stale: reject above 3 instead of scale above 8"):
            declared(second, stale="reject:3")
        with pytest.raises(ModelMismatch, match="stale: as the mode instead of scale above 8"):
            declared(second)


def test_what_is_no_rule_or_has_no_effect_is_one_typed_error_and_declares_nothing():
    with running_job(1, 1) as job, job.cluster(rank=0) as cluster:
        for wrong in ("slow", "scale:-1", "reject:x", 8):
            with pytest.raises(ConfigError, match="unknown rule for stale gradients; expected: 'accept', 'scale' or"):
                declared(cluster, stale=wrong)
            with pytest.raises(ConfigError, match="unknown rule for stale gradients"):
                declared(cluster, adopt=True, stale=wrong)
        for late_rate in (torch.optim.ASGD, torch.optim.Rprop):
            with pytest.raises(UnsupportedOptimizer, match=r"cannot be scaled by their staleness.*expected: stale="):
                cluster.optimizer(late_rate, Ones(), stale="scale")
            cluster.optimizer(late_rate, Ones(), stale="reject")
        assert set(job.client.get_status().stale_rules.values()) == {"reject above the number of workers"}
