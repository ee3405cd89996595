"""Whole jobs over each transport: the same numbers, whatever travels how, and status that says it."""

from __future__ import annotations

import grpc
import pytest
import torch
from torch import nn

import ps_worker
from ps_protocol.cluster.view import Role
from ps_protocol.model.spec import Consistency, Mode
from ps_protocol.v1 import common_pb2
from ps_protocol.v1.shard_pb2 import GetModelRequest, ModelStatus
from ps_protocol.v1.shard_pb2_grpc import ShardStub
from tests.end_to_end.training import assert_bitwise
from tests.support.length import few
from tests.support.shards import wait_until
from tests.transports.support import TRANSPORTS, hold_loop, interrupted
from tests.worker.jobs import Job, running_job, together

SYNC = Consistency(Mode.SYNC)


def net() -> nn.Module:
    """More than travels inside a message for each of two shards; with buffers, and a frozen layer."""
    model = nn.Sequential(nn.Linear(40, 901), nn.BatchNorm1d(901), nn.Tanh(), nn.Linear(901, 37), nn.Linear(37, 5))
    generator = torch.Generator().manual_seed(0)  # workers are threads: the common one would be shared
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model[4].requires_grad_(False)
    return model


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 40, generator=torch.Generator().manual_seed(100 * rank + step))


def train(cluster, steps: int = 4, *, set_to_none: bool = True) -> list[torch.Tensor]:
    model = net()
    optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        model(batch(cluster.rank, step)).square().mean().backward()
        optimizer.step()
    cluster.barrier()
    return [value.clone() for value in model.state_dict().values()]


def in_one_job(*transports: str, **arguments) -> list[list[torch.Tensor]]:
    """What each worker has at the end, one worker for each of ``transports``."""

    def work(rank: int) -> list[torch.Tensor]:
        with job.cluster(rank=rank, transport=transports[rank]) as cluster:
            return train(cluster, **arguments)

    with running_job(2, len(transports), consistency=SYNC) as job:
        return together(*(lambda rank=rank: work(rank) for rank in range(len(transports))))


@pytest.fixture(scope="module")
def over_grpc() -> list[torch.Tensor]:
    """What two workers over gRPC make of the model."""
    first, second = in_one_job("grpc", "grpc")
    assert_bitwise(first, second)
    return first


@pytest.mark.parametrize("transports", few([("bulk", "shm"), ("shm", "grpc"), ("bulk", "bulk"), ("shm", "shm")], 2))
def test_the_numbers_of_a_job_do_not_depend_on_how_they_travel(over_grpc, transports):
    for found in in_one_job(*transports):
        assert_bitwise(found, over_grpc)


def test_gradients_kept_in_place_give_the_same_numbers(over_grpc, transport):
    for found in in_one_job(transport, transport, set_to_none=False):
        assert_bitwise(found, over_grpc)


def test_gradients_kept_in_place_stay_in_one_place(transport):
    with running_job(2, 1) as job, job.cluster(transport=transport) as cluster:
        model = net()
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.05)
        places = []
        for step in range(4):
            model(batch(0, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            places.append([p.grad.data_ptr() for p in model.parameters() if p.grad is not None])
        assert len(places[0]) == 6
        assert places[1:] == places[:1] * 3


def status(job: Job, shard: int) -> ModelStatus:
    with grpc.insecure_channel(job.member(Role.SHARD, shard).member.address) as channel:
        return ShardStub(channel).GetModel(GetModelRequest(model="model"))


def test_status_names_the_transport_of_each_worker():
    with running_job(2, 3) as job:
        clusters = together(
            *(
                lambda rank=rank, name=name: job.cluster(rank=rank, transport=name)
                for rank, name in enumerate(TRANSPORTS)
            )
        )
        together(*(lambda cluster=cluster: cluster.optimizer(torch.optim.SGD, net(), lr=0.1) for cluster in clusters))
        for shard in range(2):
            assert [clock.transport for clock in status(job, shard).clocks] == list(TRANSPORTS.values())
        wait_until(lambda: [job.member(Role.WORKER, rank).stats.transport for rank in range(3)] == list(TRANSPORTS))
        for cluster in clusters:
            cluster.close()
        wait_until(lambda: not any(c.transport != common_pb2.TRANSPORT_UNSPECIFIED for c in status(job, 0).clocks))


@pytest.mark.parametrize(("asked", "found"), [("auto", "shm"), ("", "shm"), ("bulk", "bulk"), ("grpc", "grpc")])
def test_connect_and_the_environment_say_how_to_travel(monkeypatch, asked, found):
    with running_job(1, 1) as job:
        monkeypatch.setenv("PS_TRANSPORT", asked)
        with ps_worker.connect(job.address, rank=0, device="cpu") as cluster:
            train(cluster, 1)
            assert status(job, 0).clocks[0].transport == TRANSPORTS[found]


def test_an_argument_comes_before_the_environment_and_an_unknown_transport_is_refused(monkeypatch):
    monkeypatch.setenv("PS_TRANSPORT", "grpc")
    with running_job(1, 1) as job:
        with ps_worker.connect(job.address, rank=0, device="cpu", transport="bulk") as cluster:
            train(cluster, 1)
            assert status(job, 0).clocks[0].transport == common_pb2.TRANSPORT_BULK
        with pytest.raises(ps_worker.ConfigError, match="auto, shm, bulk, grpc"):
            ps_worker.connect(job.address, rank=0, device="cpu", transport="rdma")


class Alone:
    """One of two workers of a synchronous job, its gradients under the test's control."""

    def __init__(self, cluster) -> None:
        self.parameters = [nn.Parameter(torch.zeros(301, 77)), nn.Parameter(torch.zeros(5))]
        self.optimizer = cluster.optimizer(torch.optim.SGD, self.parameters, lr=1.0)

    def step(self, gradient: float) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.zero_grad(set_to_none=False)
        self.fill(gradient)
        self.optimizer.step()

    def fill(self, gradient: float) -> None:
        for parameter in self.parameters:
            parameter.grad.fill_(gradient)

    def assert_at(self, value: float) -> None:
        for parameter in self.parameters:
            assert parameter.detach().eq(value).all(), parameter


def test_ctrl_c_in_a_parked_pull_leaves_the_accepted_push_as_it_was_and_the_optimizer_usable(transport):
    with running_job(1, 2, consistency=SYNC) as job:
        clusters = together(*(lambda rank=rank: job.cluster(rank=rank, transport=transport) for rank in range(2)))
        one, two = together(*(lambda cluster=cluster: Alone(cluster) for cluster in clusters))
        together(lambda: one.step(2.0), lambda: two.step(4.0))
        one.assert_at(-3.0)
        with interrupted("receive", lambda: status(job, 0).parked_pulls == 1):
            one.step(10.0)
        # What backward writes from now on is no part of the push that was accepted.
        one.fill(1e6)
        two.step(20.0)
        two.assert_at(-18.0)
        together(lambda: one.step(6.0), lambda: two.step(8.0))
        for worker in (one, two):
            worker.assert_at(-25.0)
            assert worker.optimizer.last.clock == 3
        wait_until(lambda: [clock.transport for clock in status(job, 0).clocks] == [TRANSPORTS[transport]] * 2)


def test_ctrl_c_in_a_pull_leaves_the_optimizer_usable(transport):
    with running_job(1, 1) as job, job.cluster(transport=transport) as cluster:
        worker = Alone(cluster)
        worker.step(2.0)
        go_on = hold_loop(job.loop)
        try:
            with interrupted("receive", lambda: True):
                worker.optimizer.pull()
        finally:
            go_on()
        worker.step(3.0)
        worker.assert_at(-5.0)
        worker.optimizer.pull()
        worker.assert_at(-5.0)
        assert (worker.optimizer.version, worker.optimizer.last.clock) == (2, 2)
