"""A generated stream of clicks: every sample a function of (seed, position), every truth of (seed, id)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from .batch import CATEGORIES, NUMBERS, Batch, by_feature, in_columns
from .hashing import Bits, key, mix, quarters, uniforms

VOCABULARY = 10**8
"""Distinct ids there may be by default, over all categories."""

HELD_OUT = 1 << 40
"""Where the held-out part of a stream begins: no training set reaches it."""

_SMALLEST = 10
_COLUMNS = 32
_IDS, _NUMBERS, _RANKS, _TRUTH, _SAMPLES, _BIAS = range(6)


class Truth:
    """What clicks depend on: a factorization machine (Rendle, ICDM 2010) of rank 3 over the ids, plus a linear part
    over the numbers. Nothing is stored per id: its weight and vector are drawn from the bits of (seed, id).

    Categories with many values have smaller weights, as most of their ids are too rare to learn anything about.
    """

    def __init__(self, seed: int) -> None:
        self._key = key(seed, _TRUTH)
        strength = np.geomspace(1.0, 0.05, CATEGORIES).astype(np.float32)
        self._scales = np.stack([0.45 * strength, *[0.5 * strength**2] * 3], axis=1)
        self._numbers = 0.2 * quarters(mix(key(seed, _BIAS) + np.arange(NUMBERS, dtype=np.uint64)))[:, 0]
        self._intercept = np.float32(-1.3)

    def logits(self, numbers: npt.NDArray[np.float32], ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """log(p / (1 - p)) of a click: float32 [n] for numbers [n, 13] and ids [n, 26]."""
        hidden = quarters(mix(ids.view(np.uint64) ^ self._key))
        hidden *= self._scales
        sums = hidden.sum(axis=1)
        vectors = hidden[..., 1:].reshape(len(ids), -1)
        pairs = (np.square(sums[:, 1:]).sum(axis=1) - np.einsum("ni,ni->n", vectors, vectors)) / 2
        return self._intercept + numbers @ self._numbers + sums[:, 0] + pairs


class ClickStream(Dataset[Batch]):
    """Samples ``first`` to ``first + samples`` of the endless stream of ``seed``; the same in every process.

    A DataLoader with ``collate_fn=whole`` fetches whole batches by position, wherever these are, so that
    ``cluster.shard`` splits or leases it like any other dataset. Nothing grows with ``vocabulary``.
    """

    def __init__(
        self, samples: int, *, seed: int, first: int = 0, vocabulary: int = VOCABULARY, exponent: float = 1.2
    ) -> None:
        """``exponent`` of the power law of the ids, not 1. ``vocabulary``: distinct ids there may be, roughly."""
        self.truth = Truth(seed)
        self._samples, self._first = samples, first
        self._samples_key, self._ranks_key = key(seed, _SAMPLES), key(seed, _RANKS)
        self._id_keys = mix(key(seed, _IDS) + np.arange(CATEGORIES, dtype=np.uint64))
        sizes = np.geomspace(_SMALLEST, max(_SMALLEST, 0.4 * vocabulary), CATEGORIES)
        #: Distinct ids of each category.
        self.sizes = np.maximum(2, sizes * vocabulary / sizes.sum()).astype(np.int64)
        self._power = 1.0 / (1.0 - exponent)
        self._spans = (self.sizes + 1.0) ** (1.0 - exponent) - 1.0

    def best_scores(self, batch: Batch) -> npt.NDArray[np.float32]:
        """The true logits: no model ranks better than they do, but by luck. [n]."""
        return self.truth.logits(batch.numbers.numpy(), in_columns(batch.ids).numpy())

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indexes: Sequence[int]) -> Batch:
        """The samples at these positions, as one batch."""
        numbers, ids, luck = self._draw(np.asarray(indexes, np.uint64) + np.uint64(self._first))
        clicks = luck < _sigmoid(self.truth.logits(numbers, ids))
        labels = torch.from_numpy(clicks.astype(np.float32))
        return Batch(torch.from_numpy(numbers), by_feature(torch.from_numpy(ids)), labels)

    def _draw(self, positions: Bits) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        columns = np.arange(_COLUMNS, dtype=np.uint64)
        bits = mix(self._samples_key + (positions * np.uint64(_COLUMNS))[:, None] + columns)
        chances = uniforms(bits[:, :CATEGORIES])
        # The inverse of a bounded Pareto distribution, cut to whole ranks 0 to size - 1.
        ranks = np.minimum((chances * self._spans + 1.0) ** self._power - 1.0, self.sizes - 1).astype(np.uint64)
        ids = mix(self._id_keys + ranks).view(np.int64)
        numbers = quarters(np.ascontiguousarray(bits[:, CATEGORIES : CATEGORIES + 4])).reshape(len(bits), -1)
        return np.ascontiguousarray(numbers[:, :NUMBERS]), ids, uniforms(bits[:, -1])


def _sigmoid(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    return 1.0 / (1.0 + np.exp(-logits.astype(np.float64)))
