"""Models with tables for whole jobs, and what torch makes of the same steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ps_worker import Cluster, rows
from ps_worker.tables import EmbeddingBag

DIM = 3
ROWS = 40
#: What ids stand for the rows of the reference.
IDS = torch.cat([torch.arange(30) * 7919 - 50, torch.tensor([2**63 - 1, -(2**63), *range(10**15, 10**15 + 8)])])
TOP = 0.2

Batch = tuple[torch.Tensor, torch.Tensor]
"""Places of ids in ``IDS``, 1-D, and the offsets of the bags."""


class Model(nn.Module):
    """Two features, on one table or two, below a dense layer."""

    def __init__(self, one: Callable[..., Any], two: Callable[..., Any]) -> None:
        super().__init__()
        self.one, self.two = one, two
        self.top = nn.Linear(2 * DIM, 1)
        with torch.no_grad():
            for parameter in self.top.parameters():
                parameter.fill_(0.3)

    def forward(self, one: Batch, two: Batch) -> torch.Tensor:
        result: torch.Tensor = self.top(torch.cat([self.one(*one), self.two(*two)], 1))
        return result


def batch(generator: torch.Generator, bags: int = 4) -> Batch:
    """Bags with duplicates and empty ones, in a power law."""
    sizes = torch.randint(0, 5, (bags,), generator=generator)
    places = (torch.rand(int(sizes.sum()), generator=generator) ** 3 * ROWS).long()
    return places, torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)[:-1]])


def steps_of(seed: int, steps: int, workers: int) -> list[list[tuple[Batch, Batch]]]:
    generator = torch.Generator().manual_seed(seed)
    return [[(batch(generator), batch(generator)) for _ in range(workers)] for _ in range(steps)]


def with_ids(batch: Batch) -> Batch:
    return IDS[batch[0]], batch[1]


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output - 1).square().mean()


def on_shards(cluster: Cluster, mode: str, optimizer: rows.RowOptimizer, shared: bool) -> Model:
    one = cluster.embedding_bag(DIM, name="one", mode=mode, optimizer=optimizer)
    two = (
        cluster.embedding_bag(one, mode=mode)
        if shared
        else cluster.embedding_bag(DIM, name="two", mode=mode, optimizer=optimizer)
    )
    return Model(one, two)


def read(*bags: EmbeddingBag) -> list[torch.Tensor]:
    """All rows of each table."""
    with torch.no_grad():
        return [bag(IDS[:, None]).clone() for bag in bags]


class NaiveRows(torch.optim.Optimizer):
    """Row-wise Adagrad and FTRL, for which torch has no class, row by row as the papers write them."""

    def __init__(self, parameters: Iterable[torch.Tensor], settings: rows.RowWiseAdagrad | rows.FTRL) -> None:
        super().__init__(parameters, {})
        self._settings = settings

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad.coalesce()
            for row, values in zip(gradient.indices()[0].tolist(), gradient.values(), strict=True):
                state = self.state[parameter].setdefault(row, {})
                update = self._adagrad if isinstance(self._settings, rows.RowWiseAdagrad) else self._ftrl
                update(parameter[row], values, state)

    def _adagrad(self, row: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> None:
        state["sum"] = state.get("sum", self._settings.initial) + gradient.square().mean()
        row -= self._settings.lr * gradient / (state["sum"].sqrt() + self._settings.eps)

    def _ftrl(self, row: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> None:
        own = self._settings
        before = state.get("n", torch.full_like(row, own.initial))
        after = before + gradient.square()
        sigma = (after.pow(-own.power) - before.pow(-own.power)) / own.lr
        linear = state.get("z", torch.zeros_like(row)) + gradient - sigma * row
        curve = (own.beta + after.pow(-own.power)) / own.lr + 2 * own.l2
        shrunk = linear.sign() * (linear.abs() - own.l1).clamp(min=0)
        row.copy_(-shrunk / curve)
        state["n"], state["z"] = after, linear


OPTIMIZERS: dict[str, tuple[rows.RowOptimizer, Callable[[list[torch.Tensor]], torch.optim.Optimizer]]] = {
    "sgd": (rows.SGD(lr=0.5), lambda p: torch.optim.SGD(p, lr=0.5)),
    "adagrad": (
        rows.Adagrad(lr=0.5, initial=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.5, initial_accumulator_value=0.1),
    ),
    "adam": (rows.Adam(lr=0.05), lambda p: torch.optim.SparseAdam(p, lr=0.05)),
    "rowwise": (rows.RowWiseAdagrad(lr=0.5, initial=0.1), lambda p: NaiveRows(p, rows.RowWiseAdagrad(0.5, 0.1))),
    "ftrl": (rows.FTRL(lr=0.5, l1=0.01, l2=0.02), lambda p: NaiveRows(p, rows.FTRL(0.5, l1=0.01, l2=0.02))),
}


def reference(
    weights: list[torch.Tensor], mode: str, kind: str, shared: bool, steps: list[list[tuple[Batch, Batch]]]
) -> list[torch.Tensor]:
    """One process on the mean of the workers' losses; the rows it ends with, and the dense parameters."""
    sparse = mode != "max"
    one = nn.EmbeddingBag(ROWS, DIM, mode=mode, sparse=sparse, _weight=weights[0].clone())
    two = one if shared else nn.EmbeddingBag(ROWS, DIM, mode=mode, sparse=sparse, _weight=weights[-1].clone())
    model = Model(one, two)
    own = [one.weight] if shared else [one.weight, two.weight]
    optimizers = [torch.optim.SGD(model.top.parameters(), lr=TOP), OPTIMIZERS[kind][1](own)]
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(loss_of(model(*pair)) / len(step) for pair in step).backward()
        for number, parameter in enumerate(own):
            if not sparse:
                # torch has no sparse gradients of maxima; a row that was in a bag is used, whether it was the largest.
                used = torch.cat([pair[f][0] for pair in step for f in ((0, 1) if shared else (number,))]).unique()
                parameter.grad = torch.sparse_coo_tensor(
                    used[None], parameter.grad[used], parameter.shape, check_invariants=True
                )
        with torch.sparse.check_sparse_tensor_invariants():
            for optimizer in optimizers:
                optimizer.step()
    return [*(p.detach() for p in own), *(p.detach() for p in model.top.parameters())]


def train(
    cluster: Cluster, model: Model, optimizer: torch.optim.Optimizer, mine: list[tuple[Batch, Batch]], **step: Any
) -> None:
    for one, two in mine:
        optimizer.zero_grad()
        loss_of(model(with_ids(one), with_ids(two))).backward()
        optimizer.step(**step)
