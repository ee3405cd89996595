"""The rows of one table that backward gave gradients to, and what they come to for a push."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ps_worker.tables.compiled import Ids, Rows, add_rows, unique
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
        return self.rows.grad.detach()[len(self.rows) - len(self.ids) :].cpu().contiguous().numpy()


class Leaves:
    """Used by the training thread, and by the threads of backward, one at a time.

    Rows count from the moment they have a gradient: a forward pass without a backward leaves nothing behind, and
    ``zero_grad`` between the two takes nothing away.
    """

    def __init__(self, table: int) -> None:
        self._table = table
        self._leaves: list[Leaf] = []
        #: Rows with a gradient since the last step: what torch's tools find in the optimizer's group.
        self.tensors: list[torch.Tensor] = []

    def expect(self, order: int, ids: Ids, rows: torch.Tensor) -> None:
        """Rows of a forward pass, numbered in rising order, may get a gradient."""
        rows.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            partial(self._on_gradient, order, ids)
        )

    def collect(self) -> TableGradients | None:
        """The gradients of each id, added up in the order of the forward passes; None when there is none at all."""
        leaves = sorted((leaf for leaf in self._leaves if leaf.rows.grad is not None), key=lambda leaf: leaf.order)
        if not leaves:
            return None
        if len(leaves) == 1:
            return TableGradients(self._table, leaves[0].ids, leaves[0].gradient())
        ids, places = unique(np.concatenate([leaf.ids for leaf in leaves]))
        gradients = [leaf.gradient() for leaf in leaves]
        total = np.zeros((len(ids), gradients[0].shape[1]), np.float32)
        add_rows(total, places, np.concatenate(gradients))
        return TableGradients(self._table, ids, total)

    def clear(self) -> None:
        """They have been pushed, or are not wanted."""
        self._leaves.clear()
        self.tensors.clear()

    def _on_gradient(self, order: int, ids: Ids, rows: torch.Tensor) -> None:
        # A graph that is kept may give another gradient, which is added to the first.
        if not any(leaf.rows is rows for leaf in self._leaves):
            self._leaves.append(Leaf(order, ids, rows))
            self.tensors.append(rows)
