"""Small trainings for end-to-end tests: workers as threads of this process, servers real."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ps_worker import Cluster
from tests.worker.jobs import Job

T = TypeVar("T")
Batch = tuple[Tensor, Tensor]


def net(seed: int = 0) -> nn.Sequential:
    """A small network with initial values from ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def batches(steps: int, workers: int = 1, size: int = 4, seed: int = 1) -> list[list[Batch]]:
    """Per step, one batch for each worker."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            (torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator))
            for _ in range(workers)
        ]
        for _ in range(steps)
    ]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def concatenated(step: list[Batch]) -> Batch:
    """What one process would train on instead of the workers of one step."""
    return torch.cat([x for x, _ in step]), torch.cat([y for _, y in step])


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[Batch],
    after: Callable[[nn.Module], object] = lambda model: None,
) -> None:
    """The usual loop; ``after`` is called behind each step."""
    for batch in steps:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        after(model)


def train_alone(
    model: nn.Module, steps: Iterable[Batch], torch_class: type[torch.optim.Optimizer], **arguments: Any
) -> list[Tensor]:
    """The reference: plain torch in one process; returns the final parameters."""
    train(model, torch_class(model.parameters(), **arguments), steps)
    return values(model)


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def run_workers(job: Job, workers: int, work: Callable[[Cluster], T], timeout_seconds: float = 120.0) -> list[T]:
    """``work`` in one thread per worker, each with a connection of its own; results by rank, or the first error."""

    def one(rank: int) -> T:
        with job.cluster(rank=rank) as cluster:
            return work(cluster)

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(one, rank) for rank in range(workers)]
        return [future.result(timeout_seconds) for future in futures]


def assert_close(found: list[Tensor], wanted: list[Tensor], atol: float = 1e-6) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def assert_bitwise(found: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
