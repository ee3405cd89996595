"""The gradients that backward gives to rows of one table, added up for a push."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ps_worker.tables.compiled import Ids, Rows, add_rows, put_rows, unique
from ps_worker.tables.row_payloads import TableGradients


@dataclass(frozen=True, slots=True, eq=False)
class LookupGradient:
    """Rows of one forward pass that have a gradient."""

    #: Number of the forward pass.
    order: int
    #: int64 [n]
    ids: Ids
    #: float32 [n, dim], or one row more, the first, for the padding id.
    rows: torch.Tensor

    def gradient(self) -> Rows:
        """Return the gradients, float32 [n, dim]."""
        assert self.rows.grad is not None
        return self._of_ids(self.rows.grad)

    def values(self) -> Rows:
        """Return the values, float32 [n, dim]."""
        return self._of_ids(self.rows)

    def _of_ids(self, tensor: torch.Tensor) -> Rows:
        return tensor.detach()[len(self.rows) - len(self.ids) :].cpu().contiguous().numpy()


class RowGradients:
    """The gradients of one table. Used by the training thread, and by the threads of backward, one at a time.

    Rows are kept from the moment they have a gradient: a forward pass without a backward keeps none, and ``zero_grad``
    between the two has no effect on them.
    """

    def __init__(self, table: int) -> None:
        self._table = table
        self._gradients: list[LookupGradient] = []

    def expect(self, order: int, ids: Ids, rows: torch.Tensor) -> None:
        """Keep the rows of forward pass ``order``, a rising number, once they have a gradient."""
        rows.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            partial(self._on_gradient, order, ids)
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The rows with a gradient since the last step: none, or one tensor, in whose gradient each id is once.

        Its norm is that of the whole gradient of the table, over any number of forward passes. Values written to its
        gradient are pushed.
        """
        self._merge()
        return [each.rows for each in self._gradients]

    def collect(self) -> TableGradients | None:
        """Return the sum of the gradients of each id, in the order of the forward passes; None: there are none."""
        self._merge()
        return next((TableGradients(self._table, each.ids, each.gradient()) for each in self._gradients), None)

    def clear(self) -> None:
        """Drop the gradients."""
        self._gradients.clear()

    def _merge(self) -> None:
        """Add all gradients into one. A graph that was kept may later add another."""
        gradients = sorted(
            (each for each in self._gradients if each.rows.grad is not None), key=lambda each: each.order
        )
        self._gradients[:] = gradients if len(gradients) < 2 else [_sum_of(gradients)]
        for each in gradients if len(gradients) > 1 else ():
            each.rows.grad = None

    def _on_gradient(self, order: int, ids: Ids, rows: torch.Tensor) -> None:
        # A graph that was kept may give another gradient, which torch adds to the first.
        if not any(each.rows is rows for each in self._gradients):
            self._gradients.append(LookupGradient(order, ids, rows))


class RowTensors(Sequence[torch.Tensor]):
    """The parameters of a table's group in the optimizer: the rows that have a gradient now."""

    def __init__(self, gradients: RowGradients) -> None:
        self._gradients = gradients

    def __len__(self) -> int:
        return len(self._gradients.tensors)

    def __getitem__(self, index: Any) -> Any:
        return self._gradients.tensors[index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._gradients.tensors)

    def __add__(self, other: list[torch.Tensor]) -> list[torch.Tensor]:
        return [*self, *other]

    def __radd__(self, other: list[torch.Tensor]) -> list[torch.Tensor]:
        return [*other, *self]


def _sum_of(lookups: Sequence[LookupGradient]) -> LookupGradient:
    """Return all ids of ``lookups`` once, with the sum of their gradients and the newest of their values."""
    ids, places = unique(np.concatenate([each.ids for each in lookups]))
    gradients = np.concatenate([each.gradient() for each in lookups])
    total = np.zeros((len(ids), gradients.shape[1]), np.float32)
    add_rows(total, places, gradients)
    values = np.empty_like(total)
    put_rows(values, places, np.concatenate([each.values() for each in lookups]))
    rows = torch.from_numpy(values).to(lookups[0].rows.device).requires_grad_()
    rows.grad = torch.from_numpy(total).to(rows.device)
    return LookupGradient(lookups[-1].order, ids, rows)
