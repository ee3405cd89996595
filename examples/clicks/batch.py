"""Owns the shape of click samples: 13 numbers, 26 categories as int64 ids, a label."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

NUMBERS = 13
CATEGORIES = 26
FEATURES = tuple(f"C{number}" for number in range(1, CATEGORIES + 1))

T = TypeVar("T")


class Batch(NamedTuple):
    """Samples as the models take them. No id is in two features, so that features may share a table."""

    #: float32 [n, 13], about -2 to 2, or log(1 + count).
    numbers: Tensor
    #: By feature its ids, int64 [n, 1], any values.
    ids: dict[str, Tensor]
    #: float32 [n], 1 for a click.
    labels: Tensor


def by_feature(ids: Tensor) -> dict[str, Tensor]:
    """The columns of ids [n, 26]."""
    return dict(zip(FEATURES, torch.split(ids, 1, dim=1), strict=True))


def in_columns(ids: dict[str, Tensor]) -> Tensor:
    """Ids by feature as one tensor, [n, 26]."""
    return torch.cat([ids[name] for name in FEATURES], dim=1)


def whole(batch: T) -> T:
    """The ``collate_fn`` for datasets whose ``__getitems__`` gives batches ready made."""
    return batch
