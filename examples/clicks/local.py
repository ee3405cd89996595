"""One process in place of a cluster: what the examples ask of ``ps_worker``, in plain torch, to compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from ps_worker import ConfigError, files, rows
from ps_worker.tables import Table

T = TypeVar("T")


class LocalBags(nn.Module):
    """Sums of rows by feature, from one sparse ``nn.Embedding`` for all tables: these are alike and share no id.

    An id gets a row of its own while there are ``capacity``, then shares one. In evaluation an id that was not trained
    has the first values of one.
    """

    def __init__(self, features: Mapping[str, Table], capacity: int) -> None:
        """Raises ConfigError for tables that are not alike, begin otherwise than normal, or are not run by Adagrad."""
        super().__init__()
        table = next(iter(features.values()))
        init, adagrad = table.init, table.optimizer
        alike = len({(each.dim, each.init, each.optimizer) for each in features.values()}) == 1
        if not (alike and isinstance(init, rows.Normal) and isinstance(adagrad, rows.Adagrad)):
            raise ConfigError("one process cannot hold these tables", expected="alike, Normal and Adagrad")
        self.optimizer = adagrad
        self.rows = nn.Embedding(capacity + 1, table.dim, sparse=True)
        nn.init.normal_(self.rows.weight, init.mean, init.std)
        self._capacity = capacity
        self._places: dict[int, int] = {}

    @property
    def used(self) -> int:
        """Rows that were trained."""
        return min(len(self._places), self._capacity)

    def forward(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """For ids [n, length] of each feature the sums of their rows, [n, dim]."""
        place = self._take if self.training else self._find
        joined = torch.cat([each.flatten() for each in ids.values()])
        rows = self.rows(torch.tensor([place(id) for id in joined.tolist()], dtype=torch.int64))
        parts = rows.split([each.numel() for each in ids.values()])
        return {
            name: part.view(*each.shape, self.rows.embedding_dim).sum(dim=1)
            for (name, each), part in zip(ids.items(), parts, strict=True)
        }

    def _take(self, id: int) -> int:
        places = self._places
        place = places.get(id)
        if place is None:
            place = places[id] = len(places) if len(places) < self._capacity else id % self._capacity
        return place

    def _find(self, id: int) -> int:
        return self._places.get(id, self._capacity)


class LocalOptimizer:
    """The torch optimizer of a model's dense parameters, beside an Adagrad of its rows."""

    def __init__(self, torch_class: type[torch.optim.Optimizer], model: nn.Module, **arguments: Any) -> None:
        bags = [module for module in model.modules() if isinstance(module, LocalBags)]
        of_rows = {id(module.rows.weight) for module in bags}
        self._optimizers = [torch_class([p for p in model.parameters() if id(p) not in of_rows], **arguments)]
        # Torch warns once unless this is said.
        torch.sparse.check_sparse_tensor_invariants.disable()
        for module in bags:
            row = module.optimizer
            of_torch = torch.optim.Adagrad(
                module.rows.parameters(),
                lr=row.lr,
                lr_decay=row.lr_decay,
                eps=row.eps,
                initial_accumulator_value=row.initial,
            )
            self._optimizers.append(of_torch)

    def step(self) -> None:
        """As in torch."""
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """As in torch."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def pull(self) -> None:
        """Nobody else has changed anything."""


class OneProcess:
    """Answers as a ``Cluster`` of one worker and no shard; used from the training thread."""

    rank, world_size, device = 0, 1, torch.device("cpu")

    def __init__(self, capacity: int) -> None:
        """``capacity`` in rows, for all tables together."""
        self._capacity = capacity

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def embedding_bags(self, features: Mapping[str, Table], *, mode: str = "sum") -> LocalBags:
        """See LocalBags; ``mode`` is "sum"."""
        return LocalBags(features, self._capacity)

    def optimizer(self, torch_class: type[torch.optim.Optimizer], model: nn.Module, **arguments: Any) -> LocalOptimizer:
        """See LocalOptimizer."""
        return LocalOptimizer(torch_class, model, **arguments)

    def shard(self, loader: T) -> T:
        """All of it."""
        return loader

    def files(self, **how: Any) -> files.FileBatches:
        """All rows."""
        return files.read(**how)

    def prefetch(self, loader: T, ids_of: Callable[[Any], object]) -> T:
        """Rows are here already."""
        return loader

    def barrier(self) -> None:
        """Nobody to wait for."""

    def report(self, **metrics: float | Tensor) -> None:
        """Nobody to tell."""
