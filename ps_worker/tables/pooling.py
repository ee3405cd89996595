"""The results of modules from rows: gathered or pooled as torch does, with gradients added up by compiled loops.

On the CPU torch's own backward of ``embedding_bag`` sorts all ids; here gradients are added to distinct rows directly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ps_worker.tables.batch import DistinctIds
from ps_worker.tables.compiled import Rows, add_bags, add_rows, dot_bags

#: Index of the row of the padding id; it is in no bag.
PADDING_ROW = 0


def gathered(rows: torch.Tensor, ids: DistinctIds, shape: torch.Size) -> torch.Tensor:
    """The row of each id of a batch of this ``shape``; float32 [*shape, dim].

    It may be written to. Rows that have no gradient are the result where no id comes twice.
    """
    if ids.all_different:
        result = rows.view(*shape, rows.shape[1])
        # A user may change it in place; the rows are a leaf of the graph.
        return result.clone() if rows.requires_grad else result
    if _compiled(rows) and not ids.padded:
        flat: torch.Tensor = _Gathered.apply(rows, ids.places)  # type: ignore[no-untyped-call]
        return flat.view(*shape, rows.shape[1])
    return functional.embedding(ids.places.view(shape), rows, PADDING_ROW if ids.padded else None)


def pooled(
    rows: torch.Tensor,
    places: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    *,
    mode: str,
    padded: bool,
) -> torch.Tensor:
    """Sum, mean or maximum of the rows of each bag; float32 [bags, dim]. ``offsets``: int64 [bags + 1]."""
    if _compiled(rows) and mode != "max":
        result: torch.Tensor = _Pooled.apply(rows, places, offsets, weights, mode, padded)  # type: ignore[no-untyped-call]
        return result
    return _embedding_bag(rows, places, offsets, weights, mode, padded)


def _compiled(rows: torch.Tensor) -> bool:
    return rows.device.type == "cpu" and rows.requires_grad


def _embedding_bag(
    rows: torch.Tensor,
    places: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    mode: str,
    padded: bool,
) -> torch.Tensor:
    return functional.embedding_bag(
        places,
        rows,
        offsets,
        mode=mode,
        per_sample_weights=weights,
        include_last_offset=True,
        padding_idx=PADDING_ROW if padded else None,
    )


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.shape = rows.shape
        return functional.embedding(places, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = np.zeros(tuple(ctx.shape), np.float32)
        [places] = ctx.saved_tensors
        add_rows(total, places.numpy(), _values(gradient))
        return torch.from_numpy(total), None


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        places: torch.Tensor,
        offsets: torch.Tensor,
        weights: torch.Tensor | None,
        mode: str,
        padded: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, places, offsets, weights)
        ctx.mean, ctx.skipped = mode == "mean", PADDING_ROW if padded else -1
        return _embedding_bag(rows, places, offsets, weights, mode, padded)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, places, offsets, weights = ctx.saved_tensors
        where, bags = (places.numpy(), offsets.numpy(), ctx.skipped), _values(gradient)
        factors = np.empty(0, np.float32) if weights is None else _values(weights)
        total = np.zeros(rows.shape, np.float32)
        add_bags(total, *where, bags, factors, mean=ctx.mean)
        of_weights = None
        if weights is not None and ctx.needs_input_grad[3]:
            products = np.zeros(len(factors), np.float32)
            dot_bags(products, *where, bags, rows.detach().numpy())
            of_weights = torch.from_numpy(products)
        return torch.from_numpy(total), None, None, of_weights, None, None


def _values(gradient: torch.Tensor) -> Rows:
    return gradient.detach().to(torch.float32).contiguous().numpy()
