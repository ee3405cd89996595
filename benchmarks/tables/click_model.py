"""The model that training steps are measured with: DLRM (Naumov et al. 2019), as the example of clicks has it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.tables.ids import DIM, power_law

FEATURES = tuple(f"C{number}" for number in range(1, 27))
NUMBERS = 13
SAMPLES = 4096
"""In a batch."""

IDS = 100_000
"""Different ids of each feature."""

_WIDTH = 64


class Batch(NamedTuple):
    """Samples: float32 [n, 13], by feature int64 [n, 1], float32 [n]."""

    numbers: Tensor
    ids: dict[str, Tensor]
    labels: Tensor


def batches(count: int, samples: int = SAMPLES, ids: int = IDS) -> list[Batch]:
    """The same ones in every process; ids are below ``ids``, by a power law."""
    rng = np.random.default_rng(0)
    return [
        Batch(
            torch.from_numpy(rng.standard_normal((samples, NUMBERS), np.float32)),
            {name: torch.from_numpy(power_law(rng, samples, ids)).view(-1, 1) for name in FEATURES},
            torch.from_numpy((rng.random(samples) < 0.3).astype(np.float32)),
        )
        for _ in range(count)
    ]


class ClickModel(nn.Module):
    """An MLP over the numbers, dot products of all pairs of vectors, an MLP over these.

    ``bags`` gives ids by feature their vectors by feature, [n, DIM] each.
    """

    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags = bags
        vectors = len(FEATURES) + 1
        pairs = vectors * (vectors - 1) // 2
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, DIM))
        self.top = nn.Sequential(nn.Linear(DIM + pairs, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 1))
        self._pairs = torch.tril_indices(vectors, vectors, -1)

    def forward(self, numbers: Tensor, ids: dict[str, Tensor]) -> Tensor:
        """The logit of a click: [n]."""
        dense = self.bottom(numbers)
        vectors = torch.stack([dense, *self.bags(ids).values()], dim=1)
        dots = (vectors @ vectors.mT)[:, self._pairs[0], self._pairs[1]]
        found: Tensor = self.top(torch.cat([dense, dots], dim=1)).squeeze(1)
        return found


def train(model: ClickModel, batch: Batch, *optimizers: torch.optim.Optimizer) -> None:
    """One step."""
    logits = model(batch.numbers, batch.ids)
    nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


class LocalBags(nn.Module):
    """Tables of one process: an ``nn.EmbeddingBag`` for each feature, with sparse gradients."""

    def __init__(self, ids: int) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: nn.EmbeddingBag(ids, DIM, mode="sum", sparse=True) for name in FEATURES})

    def forward(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        """For each feature the sums of its rows, [n, DIM]."""
        return {name: table(ids[name]) for name, table in self.tables.items()}
