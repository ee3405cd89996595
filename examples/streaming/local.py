"""One process in place of a cluster: what the example asks of ``ps_worker``, in plain torch, to compare with.

A table is a tensor with a row for each id that there will be: nothing is hashed, grows, expires or survives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from ps_worker import rows

T = TypeVar("T")


class LocalRows(nn.Module):
    """A sparse ``nn.Embedding``, with SGD or row-wise Adagrad, which torch has not."""

    def __init__(self, capacity: int, dim: int, optimizer: rows.SGD | rows.RowWiseAdagrad, init: rows.Init) -> None:
        super().__init__()
        self.rows = nn.Embedding(capacity, dim, sparse=True)
        if isinstance(init, rows.Normal):
            nn.init.normal_(self.rows.weight, init.mean, init.std)
        else:
            nn.init.constant_(self.rows.weight, init.value)
        self._optimizer = optimizer
        initial = optimizer.initial if isinstance(optimizer, rows.RowWiseAdagrad) else 0.0
        self._sums = torch.full((capacity,), initial)

    def forward(self, ids: Tensor) -> Tensor:
        """Ids of any shape from 0 to ``capacity`` - 1, as their rows."""
        return self.rows(ids)

    @torch.no_grad()
    def step(self) -> None:
        """Update the rows that have a gradient, and drop it."""
        gradient, self.rows.weight.grad = self.rows.weight.grad, None
        if gradient is None:
            return
        gradient = gradient.coalesce()
        ids, change = gradient.indices()[0], gradient.values()
        if isinstance(self._optimizer, rows.RowWiseAdagrad):
            sums = self._sums.index_select(0, ids).add_(change.square().mean(dim=1))
            self._sums.index_copy_(0, ids, sums)
            change = change / (sums.sqrt() + self._optimizer.eps).unsqueeze(1)
        # A third of the time of index_add_, and no id comes twice.
        values = self.rows.weight.index_select(0, ids).add_(change, alpha=-self._optimizer.lr)
        self.rows.weight.index_copy_(0, ids, values)


class LocalOptimizer:
    """The torch optimizer of a model's dense parameters, and those of its rows."""

    def __init__(self, torch_class: type[torch.optim.Optimizer], model: nn.Module, **arguments: Any) -> None:
        self._rows = [module for module in model.modules() if isinstance(module, LocalRows)]
        of_rows = {id(module.rows.weight) for module in self._rows}
        self._dense = torch_class([p for p in model.parameters() if id(p) not in of_rows], **arguments)

    def step(self) -> None:
        """As in torch."""
        self._dense.step()
        for each in self._rows:
            each.step()

    def zero_grad(self) -> None:
        """As in torch."""
        self._dense.zero_grad()

    def pull(self) -> None:
        """Nobody else has changed anything."""


class OneProcess:
    """Answers as a ``Cluster`` of one worker and no shard. Used from the training thread."""

    rank, world_size, device = 0, 1, torch.device("cpu")

    def __init__(self, capacities: Mapping[str, int]) -> None:
        """``capacities``: the rows of each table."""
        self._capacities = capacities
        # Torch warns once unless this is said.
        torch.sparse.check_sparse_tensor_invariants.disable()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def embedding(self, dim: int, *, name: str, optimizer: Any, init: Any, **life: Any) -> LocalRows:
        """See LocalRows; rows are not admitted and do not expire."""
        return LocalRows(self._capacities[name], dim, optimizer, init)

    def optimizer(self, torch_class: type[torch.optim.Optimizer], model: nn.Module, **arguments: Any) -> LocalOptimizer:
        """See LocalOptimizer."""
        return LocalOptimizer(torch_class, model, **arguments)

    def shard(self, loader: T, *, lease: bool, name: str) -> T:
        """All of it."""
        return loader

    def prefetch(self, loader: T, ids_of: Callable[[Any], object]) -> T:
        """Rows are here already."""
        return loader

    def report(self, **metrics: float | Tensor) -> None:
        """Nobody to tell."""
