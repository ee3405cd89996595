"""A small network, its optimizer on the shards of a FakeSession, and training with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ps_worker.on_shards import declare_optimizer
from ps_worker.optimizer import PsOptimizer
from tests.worker.fakes import FakeSession


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 1))


def declare(
    session: FakeSession, model: Any, torch_class: type[torch.optim.Optimizer] = torch.optim.SGD, **arguments: Any
) -> PsOptimizer:
    policies = {k: arguments.pop(k) for k in ("nonfinite", "buffers") if k in arguments}
    return declare_optimizer(session, torch_class, model, {"lr": 0.1} | arguments, name="model", **policies)[0]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, 4, generator=generator)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()


def assert_same(model: nn.Module, reference: nn.Module) -> None:
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
