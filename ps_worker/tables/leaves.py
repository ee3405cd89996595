"""The rows of one table that backward gave gradients to, and what they come to for a push."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ps_worker.tables.compiled import Ids, Rows, add_rows, put_rows, unique
from ps_worker.tables.update import TableGradients


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """Rows of one forward pass with a gradient."""

    #: Number of the forward pass.
    order: int
    #: int64 [n]
    ids: Ids
    #: float32 [n, dim], or one row more, the first, for the padding id.
    rows: torch.Tensor

    def gradient(self) -> Rows:
        """float32 [n, dim]"""
        assert self.rows.grad is not None
        return self._of_ids(self.rows.grad)

    def values(self) -> Rows:
        """float32 [n, dim]"""
        return self._of_ids(self.rows)

    def _of_ids(self, tensor: torch.Tensor) -> Rows:
        return tensor.detach()[len(self.rows) - len(self.ids) :].cpu().contiguous().numpy()


class Leaves:
    """Used by the training thread, and by the threads of backward, one at a time.

    Rows count from the moment they have a gradient: a forward pass without a backward leaves nothing behind, and
    ``zero_grad`` between the two takes nothing away.
    """

    def __init__(self, table: int) -> None:
        self._table = table
        self._leaves: list[Leaf] = []

    def expect(self, order: int, ids: Ids, rows: torch.Tensor) -> None:
        """Rows of a forward pass, numbered in rising order, may get a gradient."""
        rows.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            partial(self._on_gradient, order, ids)
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The rows with a gradient since the last step: none, or one tensor, in whose gradient each id is once.

        So its norm is that of the table's whole gradient, over any number of forward passes; what is written to its
        gradient is what will be pushed.
        """
        self._merge()
        return [leaf.rows for leaf in self._leaves]

    def collect(self) -> TableGradients | None:
        """The gradients of each id, added up in the order of the forward passes; None when there is none at all."""
        self._merge()
        return next((TableGradients(self._table, leaf.ids, leaf.gradient()) for leaf in self._leaves), None)

    def clear(self) -> None:
        """They have been pushed, or are not wanted."""
        self._leaves.clear()

    def _merge(self) -> None:
        """Make one leaf of several. A graph that was kept may bring another gradient of those, and so another leaf."""
        leaves = sorted((leaf for leaf in self._leaves if leaf.rows.grad is not None), key=lambda leaf: leaf.order)
        self._leaves[:] = leaves if len(leaves) < 2 else [_sum_of(leaves)]
        for leaf in leaves if len(leaves) > 1 else ():
            leaf.rows.grad = None

    def _on_gradient(self, order: int, ids: Ids, rows: torch.Tensor) -> None:
        # A graph that is kept may give another gradient, which is added to the first.
        if not any(leaf.rows is rows for leaf in self._leaves):
            self._leaves.append(Leaf(order, ids, rows))


class RowTensors(Sequence[torch.Tensor]):
    """The parameters of a table's group in the optimizer, as torch's tools read them: those with a gradient now."""

    def __init__(self, leaves: Leaves) -> None:
        self._leaves = leaves

    def __len__(self) -> int:
        return len(self._leaves.tensors)

    def __getitem__(self, index: Any) -> Any:
        return self._leaves.tensors[index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._leaves.tensors)

    def __add__(self, other: list[torch.Tensor]) -> list[torch.Tensor]:
        return [*self, *other]

    def __radd__(self, other: list[torch.Tensor]) -> list[torch.Tensor]:
        return [*other, *self]


def _sum_of(leaves: Sequence[Leaf]) -> Leaf:
    """All ids of ``leaves`` once, with the sum of their gradients and the values of the last that has them."""
    ids, places = unique(np.concatenate([leaf.ids for leaf in leaves]))
    gradients = np.concatenate([leaf.gradient() for leaf in leaves])
    total = np.zeros((len(ids), gradients.shape[1]), np.float32)
    add_rows(total, places, gradients)
    values = np.empty_like(total)
    put_rows(values, places, np.concatenate([leaf.values() for leaf in leaves]))
    rows = torch.from_numpy(values).to(leaves[0].rows.device).requires_grad_()
    rows.grad = torch.from_numpy(total).to(rows.device)
    return Leaf(leaves[-1].order, ids, rows)
