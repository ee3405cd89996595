"""One process in place of a cluster: what the examples ask of ``ps_worker``, in plain torch, to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from ps_protocol.errors import ConfigError
from ps_protocol.model.tables import TableSpec
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
        specs = {(spec.dim, spec.init, spec.optimizer, *spec.options.items()) for spec in _specs(features)}
        spec = next(_specs(features))
        if len(specs) > 1 or spec.init.kind != "normal" or spec.optimizer != "adagrad":
            raise ConfigError("one process cannot hold these tables", expected="alike, Normal and Adagrad")
        self.options = spec.options
        self.rows = nn.Embedding(capacity + 1, spec.dim, sparse=True)
        nn.init.normal_(self.rows.weight, spec.init.low, spec.init.high)
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
            options = dict(module.options)
            initial = {"initial_accumulator_value": options["initial"]}
            chosen = {name: options[name] for name in ("lr", "lr_decay", "eps")}
            self._optimizers.append(torch.optim.Adagrad(module.rows.parameters(), **chosen, **initial))

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

    def prefetch(self, loader: T, ids_of: Callable[[Any], object]) -> T:
        """Rows are here already."""
        return loader

    def barrier(self) -> None:
        """Nobody to wait for."""

    def report(self, **metrics: float | Tensor) -> None:
        """Nobody to tell."""


def _specs(features: Mapping[str, Table]) -> Iterator[TableSpec]:
    return (table.spec(seed=0) for table in features.values())
