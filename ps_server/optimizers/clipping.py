"""Decides by what factor gradients are clipped, as ``torch.nn.utils.clip_grad_norm_``; norms are taken in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ps_server.optimizers.runs import parameter_runs
from ps_server.state.region import Region
from ps_server.tables.step import RowStep

_BLOCK_ELEMENTS = 1 << 17
"""Elements made float64 at a time: they stay in the processor's cache."""

_EPSILON = 1e-6
"""As in torch: added to the norm."""


def squared_norm(gradients: Region, absent: frozenset[int], tables: Iterable[RowStep] = ()) -> float:
    """The sum of the squares of all gradients; slices in ``absent`` have none. NaN where one is NaN."""
    dense = (_squares(tensor) for tensor in _present(gradients, absent))
    return total([*dense, *(_squares(torch.from_numpy(rows.gradients).view(-1)) for rows in tables)])


def total(parts: Sequence[float]) -> float:
    """The sum of squared norms, the same in every order."""
    try:
        return math.fsum(parts)
    except OverflowError:
        return math.inf


def clip_factor(max_norm: float, squared: float) -> float:
    """The factor on gradients of this squared norm; 1 where they are not longer than ``max_norm``, NaN for NaN."""
    factor = max_norm / (math.sqrt(squared) + _EPSILON)
    return 1.0 if factor > 1.0 else factor


def scale_gradients(gradients: Region, absent: frozenset[int], factor: float) -> None:
    """Multiply all gradients of variables, in place; slices in ``absent`` keep the bytes they have."""
    for tensor in _present(gradients, absent):
        tensor.mul_(factor)


def _present(gradients: Region, absent: frozenset[int]) -> Iterator[Tensor]:
    for run in parameter_runs(gradients.layout, [absent]):
        if run.absent == (False,):
            yield gradients.tensor(run.begin, run.end, run.dtype)


def _squares(flat: Tensor) -> float:
    """The sum of squares of a flat tensor."""
    sums = []
    for begin in range(0, flat.numel(), _BLOCK_ELEMENTS):
        block = flat[begin : begin + _BLOCK_ELEMENTS].double()
        sums.append(float(torch.dot(block, block)))
    return total(sums)
