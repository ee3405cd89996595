"""Small models with tables on fake shards, beside the same models in plain torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from ps_worker import rows
from ps_worker.on_shards import declare_optimizer
from ps_worker.optimizer import PsOptimizer
from ps_worker.tables import EmbeddingBag
from ps_worker.tables.table import TableModule
from tests.worker.fakes import FakeSession, first_row

DIM = 4
ROWS = 60
LR = 0.5


class Clicks(nn.Module):
    """Bags of ids from one table, and a dense layer."""

    def __init__(self, bag: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.bag = bag
        self.top = nn.Linear(DIM, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.top(self.bag(ids))
        return result


def on_shards(session: FakeSession, **arguments: Any) -> tuple[Clicks, PsOptimizer]:
    model = Clicks(EmbeddingBag(DIM, name="t", mode="sum", optimizer=rows.SGD(lr=LR), buckets=16))
    return model, declare(session, model, **arguments)


def declare(session: FakeSession, source: Any, **arguments: Any) -> PsOptimizer:
    policies = {k: arguments.pop(k) for k in ("nonfinite", "tables", "style", "torch_class") if k in arguments}
    torch_class = policies.pop("torch_class", torch.optim.SGD)
    seconds = arguments.pop("reconnect_timeout_seconds", 60.0)
    arguments = {"lr": 0.1} | arguments
    optimizer, _ = declare_optimizer(
        session, torch_class, source, arguments, name="model", reconnect_timeout_seconds=seconds, **policies
    )
    return optimizer


def in_torch() -> tuple[Clicks, torch.optim.Optimizer]:
    weight = torch.from_numpy(np.stack([first_row(row, DIM) for row in range(ROWS)]))
    model = Clicks(nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True, _weight=weight))
    groups = [{"params": model.top.parameters()}, {"params": model.bag.parameters(), "lr": LR}]
    return model, torch.optim.SGD(groups, lr=0.1)


def batches(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(ROWS, (6, 5), generator=generator) for _ in range(count)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Iterable[torch.Tensor]) -> None:
    for batch in ids:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def all_rows(module: TableModule) -> torch.Tensor:
    """Every row of the table, [ROWS, DIM]."""
    with torch.no_grad():
        result: torch.Tensor = module(torch.arange(ROWS)[:, None])
        return result


def assert_same(model: Clicks, reference: Clicks) -> None:
    for found, expected in zip(model.top.parameters(), reference.top.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(all_rows(model.bag), reference.bag.weight.detach(), rtol=0, atol=1e-5)
