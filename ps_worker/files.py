"""ColumnSpec of files as tensors, for ``Cluster.files``; ``read`` gives batches without a cluster."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ps_worker.data.files.batches import FileBatches, ShareStretches, dataset
from ps_worker.data.files.columns import ColumnSpec, Ragged, floats, hashed, ids
from ps_worker.data.files.sources import Paths
from ps_worker.data.samples import Share

__all__ = ["ColumnSpec", "FileBatches", "Ragged", "floats", "hashed", "ids", "read"]


def read(
    paths: Paths,
    columns: Mapping[str, ColumnSpec | str] | Iterable[str] | None = None,
    *,
    batch_size: int,
    seed: int = 0,
    shuffle: bool | int = True,
    drop_last: bool = False,
    transform: Callable[[dict[str, Any]], Any] | None = None,
    on_bad_file: str = "raise",
    format: str | None = None,
    delimiter: str | None = None,
    header: Sequence[str] | None = None,
    quoted_lines: bool = False,
) -> FileBatches:
    """Read files in one process, without a cluster: all rows, in the order of ``seed``.

    Args:
        paths: See ``Cluster.files``.
        columns: See ``Cluster.files``.
        batch_size: See ``Cluster.files``.
        seed: Of the order; another one in each epoch.
        shuffle: See ``Cluster.files``.
        drop_last: See ``Cluster.files``.
        transform: See ``Cluster.files``.
        on_bad_file: See ``Cluster.files``.
        format: See ``Cluster.files``.
        delimiter: See ``Cluster.files``.
        header: See ``Cluster.files``.
        quoted_lines: See ``Cluster.files``.

    Raises:
        ConfigError: See ``Cluster.files``.
        DamagedData: See ``Cluster.files``.
    """
    data = dataset(
        paths,
        columns,
        batch_size,
        seed=seed,
        shuffle=shuffle,
        drop_last=drop_last,
        transform=transform,
        on_bad_file=on_bad_file,
        format=format,
        delimiter=delimiter,
        header=header,
        quoted_lines=quoted_lines,
    )
    return FileBatches(data, ShareStretches(data.layout, Share(0, 1, seed), itertools.count()))
