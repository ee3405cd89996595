"""What adoption costs on the wire, and what a step moves of a model whose base is frozen. In one process, about 4 s."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from chaos.proxy import Proxy
from ps_protocol.model.spec import Consistency, Mode
from ps_worker import Cluster
from ps_worker.step.shard_values import ShardValues
from tests.end_to_end.training import run_workers, values
from tests.support.length import paired
from tests.worker.jobs import running_job

HEADERS = 20_000
"""Of both shards, while a model is declared: messages about it, frames of HTTP/2."""

QUESTION = 3_000
"""Of one question of a waiting worker whether the model has values, and its answer."""

STEP_HEADERS = 500
"""Of both shards, in a step."""


class Adapted(nn.Module):
    """As a model with LoRA: large layers that are frozen, and a low-rank update of each."""

    def __init__(self, layers: int = 3, width: int = 256, rank: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.ModuleList(nn.Linear(width, width) for _ in range(layers)).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(rank, width, bias=False) for _ in range(layers))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            inputs = torch.tanh(base(inputs) + up(down(inputs)))
        return inputs


def nbytes(parameters) -> int:
    return sum(p.nbytes for p in parameters)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(number)
    model(torch.randn(2, 256, generator=generator)).square().mean().backward()
    optimizer.step()


def test_adoption_moves_one_upload_in_all_and_one_pull_for_each_worker(monkeypatch):
    asked, initialised = [], ShardValues.initialised
    monkeypatch.setattr(ShardValues, "initialised", lambda values: asked.append(values) or initialised(values))
    size = nbytes(Adapted().parameters())

    def work(cluster):
        with counted(cluster) as carried:
            model = Adapted()
            cluster.adopt(torch.optim.AdamW(model.parameters(), lr=0.1), model)
            found = carried.take()
            # Another worker that became the one of the lowest rank would upload, too.
            cluster.barrier()
            return found

    with running_job(2, 2) as job:
        job.cluster = _over_grpc(job)
        (up, down), (other_up, other_down) = run_workers(job, 2, work)
    assert size <= up <= size + HEADERS
    # The longer the first values take, the more often the other worker asks for them.
    questions = QUESTION * len(asked)
    assert other_up <= HEADERS + questions
    assert size <= down <= size + HEADERS
    assert size <= other_down <= size + HEADERS + questions


def test_state_of_an_optimizer_goes_up_once():
    def work(cluster):
        with counted(cluster) as carried:
            model = Adapted()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            step(model, optimizer, 0)
            trained = [p for p in model.parameters() if p.requires_grad]
            cluster.adopt(optimizer, model)
            up, _ = carried.take()
            cluster.barrier()
            return up, nbytes(model.parameters()) + 2 * nbytes(trained)

    with running_job(2, 2) as job:
        job.cluster = _over_grpc(job)
        (up, size), (other_up, _) = run_workers(job, 2, work)
    assert size <= up <= size + HEADERS
    assert other_up <= HEADERS


@pytest.mark.parametrize(("trained_only", "mode"), paired([True, False], [Mode.ASYNC, Mode.SYNC]))
def test_a_step_moves_the_adapters_alone(trained_only, mode):
    with (
        running_job(2, 1, consistency=Consistency(mode)) as job,
        job.cluster(rank=0, transport="grpc") as cluster,
        counted(cluster) as carried,
    ):
        model = Adapted()
        base = values(model.base)
        trained = [p for p in model.parameters() if p.requires_grad]
        given = trained if trained_only else model.parameters()
        optimizer = cluster.adopt(torch.optim.AdamW(given, lr=0.01), model)
        size = nbytes(trained)
        up, down = carried.take()
        if trained_only:
            # The base is not declared: not even its first values travel.
            assert max(up, down) <= size + HEADERS < nbytes(model.parameters())
        for number in range(4):
            step(model, optimizer, number)
            up, down = carried.take()
            assert size <= up <= size + STEP_HEADERS
            assert size <= down <= size + STEP_HEADERS
        assert all(torch.equal(a, b) for a, b in zip(base, values(model.base), strict=True))


def _over_grpc(job):
    join = job.cluster
    return lambda rank: join(rank=rank, transport="grpc")


@dataclass
class Carried:
    """Bytes of all proxies; each number is written by one thread at a time per connection."""

    up: list[int] = field(default_factory=list)
    down: list[int] = field(default_factory=list)

    def take(self) -> tuple[int, int]:
        """Bytes to the shards and from them since the last call."""
        found = sum(self.up), sum(self.down)
        self.up.clear()
        self.down.clear()
        return found


class CountingProxy(Proxy):
    def __init__(self, target: str, carried: Carried) -> None:
        self._carried = carried
        super().__init__(target)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        super()._pump(_Counted(source, self._carried, up=sink.getpeername() == self._target), sink)


class _Counted:
    """A socket whose received bytes are counted."""

    def __init__(self, source: socket.socket, carried: Carried, *, up: bool) -> None:
        self._source = source
        self._counts = carried.up if up else carried.down

    def recv(self, size: int) -> bytes:
        data = self._source.recv(size)
        self._counts.append(len(data))
        return data

    def __getattr__(self, name: str):
        return getattr(self._source, name)


@contextmanager
def counted(cluster: Cluster) -> Iterator[Carried]:
    """The bytes between ``cluster``, which uses gRPC alone, and the shards."""
    carried, session = Carried(), cluster._session
    real, proxies = session.shard_address, {}

    def through_proxy(shard: int) -> str:
        address = real(shard)
        if address not in proxies:
            proxies[address] = CountingProxy(address, carried)
        return proxies[address].address

    session.shard_address = through_proxy
    try:
        yield carried
    finally:
        for proxy in proxies.values():
            proxy.close()
