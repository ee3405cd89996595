"""Files of rows with an id each, for tests that count them."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ps_worker.files import FileBatches


def parquet(path: Path, rows: Iterable[int], group: int = 100, **columns: Any) -> Path:
    """A file with "id", a float "x" that is half of it, and ``columns``; ``group`` rows to a row group."""
    ids = list(rows)
    table = pa.table({"id": pa.array(ids, pa.int64()), "x": pa.array([i / 2 for i in ids], pa.float32()), **columns})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=group)
    return path


def folder(root: Path, sizes: Sequence[int], group: int = 100) -> int:
    """Files of so many rows, whose ids go on; returns the number of rows."""
    count = 0
    for number, size in enumerate(sizes):
        parquet(root / f"{number:03}.parquet", range(count, count + size), group)
        count += size
    return count


def text(path: Path, lines: Iterable[str]) -> Path:
    """A text file; compressed if its name ends with .gz."""
    data = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def ids_of(batches: FileBatches | Iterable[Any], name: str = "id") -> list[int]:
    """All ids of an epoch, in order."""
    return [int(id) for batch in batches for id in batch[name]]
