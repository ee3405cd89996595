"""Rows for modules without any shard: dense weights that the ids of a test stand for."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import nn

from ps_worker.tables.binding import TableBinding
from ps_worker.tables.lookup import Lookup, Position
from ps_worker.tables.table import declared


class DenseRows:
    """Keeps the contract of RowSource; row i of a table's weight belongs to ``ids[i]``."""

    def __init__(self, weights: list[torch.Tensor], ids: list[int]) -> None:
        self.weights = weights
        self.places = {value: place for place, value in enumerate(ids)}
        self.position: Position = (0, 1)
        self.lookups: list[Lookup] = []
        self.finished = 0

    @property
    def next_position(self) -> Position:
        return self.position

    def look_up(self, lookup: Lookup) -> None:
        self.lookups.append(lookup)

    def finish(self, lookup: Lookup) -> None:
        self.finished += 1
        for wanted in lookup._wanted:
            places = [self.places[value] for value in wanted.ids.tolist()]
            wanted.rows[:] = self.weights[wanted.table].numpy()[places]

    @property
    def asked(self) -> list[list[tuple[int, list[int]]]]:
        """By lookup, tables and ids."""
        return [[(wanted.table, wanted.ids.tolist()) for wanted in lookup._wanted] for lookup in self.lookups]


def bind(modules: Iterable[nn.Module], source: DenseRows, *, trains: bool = True) -> TableBinding:
    """Give ``modules`` the rows of ``source``."""
    every = [module for given in modules for module in given.modules()]
    bound = TableBinding(declared(every, lambda: 11), lambda: source, trains=trains)
    bound.bind()
    return bound


def dense_gradients(bound: TableBinding, source: DenseRows) -> list[torch.Tensor]:
    """What the next push brings, as gradients of the weights."""
    result = [torch.zeros_like(weight) for weight in source.weights]
    for each in bound.collect().tables:
        assert len(set(each.ids.tolist())) == len(each.ids)
        places = [source.places[value] for value in each.ids.tolist()]
        result[each.table][places] = torch.from_numpy(np.array(each.gradients))
    return result
