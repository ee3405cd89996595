"""Frozen parameters travel once, and again when they change, whatever the transport and the mode."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from ps_protocol.cluster.view import Role
from ps_protocol.model.spec import Consistency, Mode
from tests.end_to_end.training import assert_bitwise, assert_close, run_workers, values
from tests.support.length import paired
from tests.worker.jobs import running_job

FROZEN_BYTES = 4 * 512 * 512
TRAINED_BYTES = 4 * (512 + 1)
SLACK = 512
"""Bytes of padding between variables, on two shards, both ways."""


class Adapted(nn.Module):
    """A large layer that is frozen, and a small one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(512, 512, bias=False)
        self.head = nn.Linear(512, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.base(inputs)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    optimizer.zero_grad()
    model(torch.randn(2, 512, generator=generator)).square().mean().backward()
    optimizer.step()


def freeze(model: Adapted, number: int) -> None:
    """Frozen, trained in steps 3 and 4, then frozen again."""
    model.base.requires_grad_(number in (3, 4))


def alone(**settings: float) -> list[torch.Tensor]:
    model = Adapted()
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    for number in range(7):
        freeze(model, number)
        step(model, optimizer, number)
    return values(model)


@pytest.mark.parametrize(("transport", "mode"), paired(["grpc", "bulk", "shm"], [Mode.ASYNC, Mode.SYNC]))
def test_frozen_parameters_travel_only_when_they_change(transport, mode):
    with running_job(2, 1, consistency=Consistency(mode)) as job, job.cluster(rank=0, transport=transport) as cluster:
        model = Adapted()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.01, momentum=0.9)
        moved = []
        for number in range(7):
            freeze(model, number)
            step(model, optimizer, number)
            moved.append(optimizer.last.transferred_bytes)
        found = values(model)
    small, large = 2 * TRAINED_BYTES, 2 * (TRAINED_BYTES + FROZEN_BYTES)
    for nbytes, expected in zip(moved, [small] * 3 + [large] * 2 + [small] * 2, strict=True):
        assert expected <= nbytes <= expected + SLACK
    assert_close(found, alone(lr=0.01, momentum=0.9))


def test_what_one_worker_trains_comes_to_another_that_has_it_frozen():
    turn = threading.Barrier(2)

    def work(cluster):
        model = Adapted()
        model.base.requires_grad_(cluster.rank == 0)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        for number in range(3):
            for rank in range(2):
                if cluster.rank == rank:
                    step(model, optimizer, number)
                turn.wait(60)
        moved = optimizer.last.transferred_bytes
        optimizer.pull()
        return moved, values(model)

    with running_job(1, 2) as job:
        (_, one), (moved, other) = run_workers(job, 2, work)
    assert moved >= FROZEN_BYTES
    assert_bitwise(one, other)


def test_a_frozen_parameter_is_whole_again_after_a_pull_and_after_a_stream_was_lost():
    with running_job(1, 1) as job, job.cluster(rank=0) as cluster:
        model = Adapted()
        model.base.requires_grad_(False)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        base = model.base.weight.detach().clone()
        step(model, optimizer, 0)
        optimizer.pull()
        assert torch.equal(model.base.weight, base)
        optimizer._model.pipeline._drop()
        step(model, optimizer, 1)
        assert optimizer.last.transferred_bytes >= FROZEN_BYTES
        step(model, optimizer, 2)
        assert optimizer.last.transferred_bytes <= 2 * TRAINED_BYTES + SLACK
        assert torch.equal(model.base.weight, base)


@pytest.mark.parametrize("settings", [{"overlap": True}, {"wire": "bf16"}, {"wire": "int8"}, {"wire": "topk:0.5"}])
def test_it_holds_with_wire_formats_and_overlap(settings):
    with running_job(1, 1) as job, job.cluster(rank=0, transport="bulk") as cluster:
        model = Adapted()
        model.base.requires_grad_(False)
        base = model.base.weight.detach().clone()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1, **settings)
        for number in range(4):
            step(model, optimizer, number)
        optimizer.finish()
        assert optimizer.last.transferred_bytes <= 2 * TRAINED_BYTES + SLACK
        if settings == {"wire": "bf16"}:
            base = base.bfloat16().float()
        assert torch.equal(model.base.weight, base)
        # Trained for a while, then frozen: it comes to what the shard has, also bit by bit.
        for number in range(12):
            model.base.requires_grad_(number < 2)
            step(model, optimizer, number)
        optimizer.finish()
        served = Adapted()
        with job.cluster(Role.EVALUATOR) as evaluator:
            next(evaluator.follow(served))
    tolerance = 5e-3 if settings == {"wire": "bf16"} else 1e-6
    torch.testing.assert_close(model.base.weight, served.base.weight, rtol=0, atol=tolerance)


@pytest.mark.parametrize("writes", ["ignore", "assign"])
def test_what_is_set_in_a_frozen_parameter_is_dropped_or_carried_as_in_any_other(writes):
    with running_job(1, 1) as job, job.cluster(rank=0) as cluster:
        model = Adapted()
        model.base.requires_grad_(False)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1, writes=writes)
        base = model.base.weight.detach().clone()
        step(model, optimizer, 0)
        with torch.no_grad():
            model.base.weight.add_(1)
        step(model, optimizer, 1)
        expected = base if writes == "ignore" else base + 1
        assert torch.equal(model.base.weight, expected)
        served = Adapted()
        with job.cluster(Role.EVALUATOR) as evaluator:
            next(evaluator.follow(served))
        assert torch.equal(served.base.weight, expected)
