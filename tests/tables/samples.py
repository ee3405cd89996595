"""Tables, ids and updates for the tests of this folder."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ps_protocol.model.row_optimizers import ROW_OPTIMIZERS
from ps_protocol.model.tables import Ids, RowInit, RowLife, TableSpec
from ps_server.tables.bucket_contents import BucketContents
from ps_server.tables.step import RowStep
from ps_server.tables.table import ShardTable

UNIFORM = RowInit("uniform", -0.1, 0.1)
NO_IDS: Ids = np.empty(0, np.int64)


def spec(
    optimizer: str = "sgd",
    *,
    dim: int = 4,
    buckets: int = 8,
    init: RowInit = UNIFORM,
    life: RowLife = RowLife(),  # noqa: B008 - frozen
    name: str = "items",
    seed: int = 1,
    **options: float,
) -> TableSpec:
    return TableSpec(
        name, dim, seed, init, optimizer, {**ROW_OPTIMIZERS[optimizer].defaults(), **options}, life, buckets
    )


def table(of: TableSpec) -> ShardTable:
    return ShardTable(of, range(of.buckets))


def use(held: ShardTable, ids: Sequence[int] | Ids, gradients: npt.NDArray[np.float32] | None = None) -> None:
    """One update with these ids; without gradients, of zeros."""
    numbers = np.array(ids, np.int64)
    if gradients is None:
        gradients = np.zeros((numbers.size, held.spec.dim), np.float32)
    held.apply(RowStep(0, numbers, gradients, held.updates + 1, held.spec.options))


def values(held: ShardTable, ids: Sequence[int] | Ids) -> npt.NDArray[np.float32]:
    out = np.empty((len(ids), held.spec.dim), np.float32)
    held.look_up(np.array(ids, np.int64), out)
    return out


def random_ids(random: np.random.Generator, count: int) -> Ids:
    """Different ids, of all sizes and signs."""
    return np.unique(random.integers(-(2**63), 2**63 - 1, 2 * count) >> random.integers(0, 60, 2 * count))[:count]


def ids_there(held: ShardTable) -> set[int]:
    return {int(id_) for bucket in range(held.spec.buckets) for id_ in held.contents(bucket).ids}


def resident(array: npt.NDArray[np.float32]) -> float:
    """The part of its whole pages that has memory, by the kernel's account, or was moved out of it."""
    page, begin = mmap.PAGESIZE, array.ctypes.data
    first, last = -(-begin // page), (begin + array.nbytes) // page
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(8 * first)
        entries = np.frombuffer(pages.read(8 * (last - first)), np.uint64)
    return float((entries >> np.uint64(62) != 0).mean())


def same(a: BucketContents, b: BucketContents) -> bool:
    return a.bucket == b.bucket and all(bytes(x) == bytes(y) for x, y in zip(a.pieces(), b.pieces(), strict=True))
