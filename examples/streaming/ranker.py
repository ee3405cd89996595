"""The model in plain torch. The modules that look up ids are given to it: rows on shards, or of this process."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .batch import Batch
from .events import NONE, NUMBERS


class Ranker(nn.Module):
    """Attention of the item over its user's last items (Zhou et al., KDD 2018), then as DLRM (Naumov et al. 2019).

    ``users`` and ``items`` give ids of any shape their vectors, [*shape, dim]. Topics are few: they are a part of this.
    """

    def __init__(self, users: nn.Module, items: nn.Module, dim: int, topics: int, width: int = 64) -> None:
        super().__init__()
        self.users, self.items = users, items
        self.topics = nn.Embedding(topics, dim)
        nn.init.normal_(self.topics.weight, std=0.1)
        self.query = nn.Linear(dim, dim)
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, width), nn.ReLU(), nn.Linear(width, dim))
        #: Of numbers, user, item and last items.
        vectors = 4
        pairs = vectors * (vectors - 1) // 2
        self.top = nn.Sequential(
            nn.Linear(vectors * dim + pairs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)

    def forward(self, batch: Batch) -> Tensor:
        """The logit of a click: [n]."""
        items = self.items(batch.items) + self.topics(batch.topics)
        item, last = items[:, 0], items[:, 1:]
        # Products and sums: bmm is slow with matrices this small.
        fits = (last * self.query(item).unsqueeze(1)).sum(dim=2) / item.shape[1] ** 0.5
        fits = fits.masked_fill(batch.items[:, 1:] == NONE, -torch.inf)
        # The first place, of weight exp(0), is nothing: a user may have been shown no item.
        weights = torch.softmax(nn.functional.pad(fits, (1, 0)), dim=1)[:, 1:]
        interest = (weights.unsqueeze(2) * last).sum(dim=1)
        vectors = torch.stack([self.bottom(batch.numbers), self.users(batch.users), item, interest], dim=1)
        dots = (vectors[:, self.pairs[0]] * vectors[:, self.pairs[1]]).sum(dim=2)
        return self.top(torch.cat([vectors.flatten(1), dots], dim=1)).squeeze(1)
