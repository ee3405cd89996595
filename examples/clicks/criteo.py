"""Criteo's click logs: a label, 13 counts and 26 categories, as Parquet or as text between tabs, plain or compressed.

https://ailab.criteo.com/ressources/ has them as text. A text file has no line with names; Parquet has the names here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ps_worker import files

from .batch import CATEGORIES, FEATURES, NUMBERS, Batch

COUNTS = tuple(f"I{number}" for number in range(1, NUMBERS + 1))
HEADER = ("label", *COUNTS, *FEATURES)


def columns() -> dict[str, files.ColumnSpec]:
    """Counts that are not given are 0. A category gets a seed of its own, so that no id is in two of them, and what is
    not given is an id, too.
    """
    return {
        "label": files.floats("label"),
        "counts": files.floats(*COUNTS, fill=0),
        **{name: files.hashed(name, seed=1 + at, fill=at) for at, name in enumerate(FEATURES)},
    }


def as_batch(columns: Mapping[str, Any]) -> Batch:
    """What the models take: log(1 + count), and the ids by feature."""
    ids = {name: columns[name][:, None] for name in FEATURES}
    return Batch(torch.log1p(columns["counts"].clamp(min=0)), ids, columns["label"])


def reading(path: str, batch: int) -> dict[str, Any]:
    """The arguments of ``files()`` for ``path``, a file, a folder or a pattern."""
    text = ".parquet" not in path and ".pq" not in path
    how = {"format": "csv", "delimiter": "\t", "header": HEADER} if text else {"format": "parquet"}
    return {"paths": path, "columns": columns(), "batch_size": batch, "transform": as_batch, **how}


__all__ = ["CATEGORIES", "HEADER", "as_batch", "columns", "reading"]
