"""Two models of clicks in plain torch. The module that looks up their ids is given to them: rows on shards, or here."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .batch import CATEGORIES, NUMBERS


class Dlrm(nn.Module):
    """DLRM (Naumov et al. 2019): an MLP over the numbers, dot products of all pairs of vectors, an MLP over these.

    ``bags`` gives ids by feature their vectors by feature, [n, dim] each.
    """

    def __init__(self, bags: nn.Module, dim: int, width: int = 64) -> None:
        super().__init__()
        self.bags = bags
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, width), nn.ReLU(), nn.Linear(width, dim))
        vectors = CATEGORIES + 1
        self.top = nn.Sequential(nn.Linear(dim + vectors * (vectors - 1) // 2, width), nn.ReLU(), nn.Linear(width, 1))
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)

    def forward(self, numbers: Tensor, ids: dict[str, Tensor]) -> Tensor:
        """The logit of a click: [n]."""
        dense = self.bottom(numbers)
        vectors = torch.stack([dense, *self.bags(ids).values()], dim=1)
        dots = (vectors @ vectors.mT)[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, dots], dim=1)).squeeze(1)


class FactorizationMachine(nn.Module):
    """Rendle (ICDM 2010): a weight for each feature, and for each pair of features the dot product of their vectors.

    ``bags`` gives ids by feature their rows by feature, [n, 1 + dim] each: a weight, then the vector. A number is a
    feature too, its weight and vector times its value.
    """

    def __init__(self, bags: nn.Module, dim: int) -> None:
        super().__init__()
        self.bags = bags
        self.linear = nn.Linear(NUMBERS, 1)
        self.vectors = nn.Parameter(torch.randn(NUMBERS, dim) * 0.01)

    def forward(self, numbers: Tensor, ids: dict[str, Tensor]) -> Tensor:
        """The logit of a click: [n]."""
        rows = torch.stack([*self.bags(ids).values()], dim=1)
        weights, vectors = rows[..., 0], rows[..., 1:]
        # Half of (square of the sum - sum of the squares) is the sum over all pairs.
        sums = vectors.sum(dim=1) + numbers @ self.vectors
        squares = vectors.square().sum(dim=1) + numbers.square() @ self.vectors.square()
        pairs = (sums.square() - squares).sum(dim=1) / 2
        return self.linear(numbers).squeeze(1) + weights.sum(dim=1) + pairs
