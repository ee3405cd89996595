"""Compiled functions of tables on plain arrays. Their modules are imported at the first use: numba takes a second."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float32]


def unique(ids: Ids) -> tuple[Ids, Ids]:
    """Each id once, in order of appearance, and the place of every id among them. int64 [u], int64 [n]."""
    from ps_protocol.model.ids import unique as compiled

    found, places = compiled(ids)
    return found, places


def split(ids: Ids, shard_of_bucket: npt.NDArray[np.int32], shards: int) -> tuple[Ids, Ids]:
    """Indexes of the ids, ordered by shard, and how many each shard gets. int64 [n], int64 [shards]."""
    from ps_protocol.model.ids import split as compiled

    order, counts = compiled(ids, shard_of_bucket, shards)
    return order, counts


def merge_rows(parts: Sequence[tuple[Ids, Rows]], divisor: int, weights: Sequence[float] | None) -> tuple[Ids, Rows]:
    """See ``ps_protocol.wire.row_means``."""
    from ps_protocol.wire.row_means import merge_rows as compiled

    return compiled(parts, divisor, weights)


def put_rows(target: Rows, places: Ids, rows: Rows) -> None:
    """``target[places] = rows``; float32 [u, dim], int64 [n], float32 [n, dim]."""
    from ps_worker.tables.row_kernels import put_rows as compiled

    compiled(target, places, rows)


def add_rows(target: Rows, places: Ids, rows: Rows) -> None:
    """``target[places[i]] += rows[i]`` in the order of ``i``; float32 [u, dim], int64 [n], float32 [n, dim]."""
    from ps_worker.tables.row_kernels import add_rows as compiled

    compiled(target, places, rows)


def add_bags(
    target: Rows, places: Ids, offsets: Ids, skipped: int, bags: Rows, weights: Weights, *, mean: bool
) -> None:
    """Add each bag's gradient, float32 [b, dim], to the rows it was made of, at ``places[offsets[b]:offsets[b + 1]]``.

    For a mean, each row gets its share; with ``weights``, float32 [n] or empty, times its weight. Where ``places`` is
    ``skipped`` it is in no bag; -1: all are.
    """
    from ps_worker.tables.row_kernels import add_bags as compiled

    compiled(target, places, offsets, skipped, bags, mean, weights)


def dot_bags(target: Weights, places: Ids, offsets: Ids, skipped: int, bags: Rows, rows: Rows) -> None:
    """The gradients of weights, float32 [n]: the product of each row and its bag's gradient."""
    from ps_worker.tables.row_kernels import dot_bags as compiled

    compiled(target, places, offsets, skipped, bags, rows)
