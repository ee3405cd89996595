"""Fewer bytes on the wire, and steps that return before the shards have answered: what stays and what changes."""

from __future__ import annotations

import grpc
import pytest
import torch
from torch import nn

from ps_protocol.cluster.view import Role
from ps_protocol.errors import ConfigError, NonFiniteGradient
from ps_protocol.model.spec import Consistency, Mode
from ps_protocol.v1.shard_pb2 import GetModelRequest
from ps_protocol.v1.shard_pb2_grpc import ShardStub
from tests.end_to_end.training import assert_bitwise, values
from tests.support.length import paired
from tests.support.shards import wait_until
from tests.worker.jobs import Job, running_job, together

TRANSPORTS = ["grpc", "bulk", "shm"]


def bowl(seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
    """A model whose loss is the distance to a point: parameters over two shards, one of them split."""
    generator = torch.Generator().manual_seed(seed)
    module = nn.Module()
    module.register_parameter("wide", nn.Parameter(torch.randn(64, 40, generator=generator)))
    module.register_parameter("short", nn.Parameter(torch.randn(3, generator=generator)))
    return module, torch.randn(64 * 40 + 3, generator=generator)


def backward(module: nn.Module, target: torch.Tensor) -> float:
    flat = torch.cat([p.view(-1) for p in module.parameters()])
    loss = 0.5 * (flat - target).square().sum()
    module.zero_grad()
    loss.backward()
    return loss.item()


def train(cluster, steps: int, lr: float = 0.2, **arguments):
    module, target = bowl()
    optimizer = cluster.optimizer(torch.optim.SGD, module, lr=lr, **arguments)
    losses = []
    for _ in range(steps):
        losses.append(backward(module, target))
        optimizer.step()
    optimizer.pull()
    losses.append(backward(module, target))
    return losses, optimizer, values(module)


@pytest.mark.parametrize(("transport", "wire"), paired(["grpc", "bulk"], ["bf16", "fp16", "int8"]))
def test_a_small_format_trains_as_well_with_fewer_bytes(transport, wire):
    with running_job(2, 1) as job, job.cluster(transport=transport) as cluster:
        losses, optimizer, _ = train(cluster, 60, wire=wire)
        assert losses[-1] < 1e-4 * losses[0]
        # Up and down, each shard's slices with their padding to 64 bytes; a 16-bit format halves that and adds nothing.
        region_bytes = sum(layout.parameter_bytes for layout in optimizer._model._flat.plan.layouts)
        assert region_bytes <= 4 * (64 * 40 + 3) + 3 * 63
        if wire == "int8":
            assert optimizer.last.transferred_bytes <= 0.27 * 2 * region_bytes
        else:
            assert optimizer.last.transferred_bytes == region_bytes


def test_the_largest_of_the_gradients_alone_train_too_only_slower():
    with running_job(2, 1) as job, job.cluster(transport="bulk") as cluster:
        losses, optimizer, _ = train(cluster, 300, lr=0.05, wire="topk:0.1")
        assert losses[-1] < 0.05 * losses[0]
        assert optimizer.last.transferred_bytes < 0.25 * 2 * 4 * (64 * 40 + 3)


def test_over_shared_memory_nothing_is_rounded():
    with running_job(2, 1) as job, job.cluster(transport="shm") as cluster:
        _, _, plain = train(cluster, 5, name="plain")
        _, _, small = train(cluster, 5, name="small", wire="int8")
    assert_bitwise(small, plain)


def test_an_unknown_format_is_refused_naming_those_there_are():
    with running_job() as job, job.cluster() as cluster, pytest.raises(ConfigError, match="int8"):
        cluster.optimizer(torch.optim.SGD, nn.Linear(2, 2), wire="int4")


def test_what_a_format_has_left_out_is_in_the_state_of_its_worker():
    with running_job(2, 1) as job, job.cluster(transport="bulk") as cluster:
        _, optimizer, _ = train(cluster, 3, wire="topk:0.01")
        saved = optimizer.state_dict()
        residuals = saved["ps_residuals"]
        assert residuals["rank"] == 0
        assert residuals["state"][0]["residual"].shape == (64, 40)
        assert bool(residuals["state"][0]["residual"].any())
        # Another optimizer, whose first push carries what was left out and nothing else.
        module, _ = bowl()
        other = cluster.optimizer(torch.optim.SGD, module, lr=1.0, name="other", wire="topk:1.0")
        before = values(module)
        other.load_state_dict(saved)
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        other.step()
        other.pull()
        moved = [b - a for a, b in zip(values(module), before, strict=True)]
    torch.testing.assert_close(moved[0], 0.2 * residuals["state"][0]["residual"], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("transport", "wire"), paired(TRANSPORTS, ["int8", None]))
def test_an_overlapped_step_trains_and_loses_no_push(transport, wire):
    with running_job(2, 1) as job, job.cluster(transport=transport) as cluster:
        losses, optimizer, _ = train(cluster, 60, overlap=True, wire=wire)
        assert losses[-1] < 1e-4 * losses[0]
        assert optimizer.version == 60


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_overlap_changes_no_number_in_sync(transport):
    results = []
    for overlap in (False, True):
        with running_job(2, 1, consistency=Consistency(Mode.SYNC)) as job, job.cluster(transport=transport) as cluster:
            results.append(train(cluster, 6, overlap=overlap)[2])
    assert_bitwise(*results)


def test_parameters_of_an_overlapped_step_come_with_the_next_one():
    with running_job(1, 1) as job, job.cluster() as cluster:
        parameter = nn.Parameter(torch.zeros(3))
        optimizer = cluster.optimizer(torch.optim.SGD, [parameter], lr=1.0, overlap=True)
        seen = []
        for _ in range(3):
            parameter.grad = torch.ones(3)
            optimizer.step()
            seen.append(parameter[0].item())
        assert seen == [0.0, -1.0, -2.0]
        optimizer.finish()
        assert parameter[0].item() == -3.0


def test_the_end_of_the_block_waits_for_the_last_push():
    with running_job(1, 1) as job:
        with job.cluster() as cluster:
            parameter = nn.Parameter(torch.zeros(3))
            optimizer = cluster.optimizer(torch.optim.SGD, [parameter], lr=1.0, overlap=True)
            parameter.grad = torch.ones(3)
            optimizer.step()
        assert parameter[0].item() == -1.0


def test_a_refused_gradient_is_told_by_the_next_call_and_not_applied():
    with running_job(1, 1) as job, job.cluster() as cluster:
        parameter = nn.Parameter(torch.zeros(3))
        optimizer = cluster.optimizer(torch.optim.SGD, [parameter], lr=1.0, overlap=True)
        for value in (1.0, float("nan")):
            parameter.grad = torch.full((3,), value)
            optimizer.step()
        with pytest.raises(NonFiniteGradient):
            optimizer.finish()
        parameter.grad = torch.ones(3)
        optimizer.step()
        optimizer.finish()
        assert parameter[0].item() == -2.0


def parked_pulls(job: Job) -> int:
    with grpc.insecure_channel(job.member(Role.SHARD, 0).member.address) as channel:
        return ShardStub(channel).GetModel(GetModelRequest(model="model")).parked_pulls


def test_ssp_bounds_the_use_of_parameters_also_when_they_come_a_step_later():
    """In ssp(2), beside a worker that has done 1 step, parameters may be used up to step 4, overlapped or not."""
    with running_job(1, 2, consistency=Consistency(Mode.SSP, staleness=2)) as job:
        clusters = together(lambda: job.cluster(rank=0), lambda: job.cluster(rank=1))
        parameters = [nn.Parameter(torch.zeros(3)) for _ in clusters]
        optimizers = together(
            *(
                lambda cluster=cluster, parameter=parameter: cluster.optimizer(
                    torch.optim.SGD, [parameter], lr=1.0, overlap=True
                )
                for cluster, parameter in zip(clusters, parameters, strict=True)
            )
        )

        def step(rank: int) -> None:
            parameters[rank].grad = torch.ones(3)
            optimizers[rank].step()

        step(1)
        optimizers[1].finish()
        for _ in range(3):
            step(0)
        # The parameters after step 3 would be used in step 5: they are not given out.
        wait_until(lambda: parked_pulls(job) == 1)
        assert optimizers[0].last.clock == 2
        step(1)
        optimizers[1].finish()
        optimizers[0].finish()
        assert optimizers[0].last.clock == 3
