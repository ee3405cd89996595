"""Functions of ``Cluster`` that make modules with tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ps_worker.rows import RowOptimizer
from ps_worker.tables.converted import convert
from ps_worker.tables.modules import Embedding, EmbeddingBag, EmbeddingBags
from ps_worker.tables.table import Table, TableModule


def embedding(table: int | Table | TableModule, *, padding_id: int | None = None, **settings: Any) -> Embedding:
    """A module as ``nn.Embedding`` for ids of any value: ``cluster.embedding(16, name="user")``.

    ``table`` is the ``dim`` of a new table, with a ``name`` and the other settings of ``ps_worker.tables.Table``:
    the row ``optimizer``, as ``rows.Adagrad(lr=0.05)``, ``init``, and the admission and expiry of rows; or an
    existing table or module, whose rows are shared. Rows are on the shards from ``cluster.optimizer`` on. Raises
    InvalidRequest, UnsupportedOptimizer or ConfigError for invalid settings.
    """
    return Embedding(table, padding_id=padding_id, **settings)


def embedding_bag(
    table: int | Table | TableModule,
    *,
    mode: str = "mean",
    include_last_offset: bool = False,
    padding_id: int | None = None,
    **settings: Any,
) -> EmbeddingBag:
    """A module as ``nn.EmbeddingBag`` for ids of any value; ``mode`` is "sum", "mean" or "max".

    ``table`` and ``settings``: see ``embedding``.
    """
    return EmbeddingBag(table, mode=mode, include_last_offset=include_last_offset, padding_id=padding_id, **settings)


def embedding_bags(
    features: Mapping[str, Table | TableModule | tuple[Table | TableModule, str]],
    *,
    mode: str = "mean",
    include_last_offset: bool = False,
    padding_id: int | None = None,
) -> EmbeddingBags:
    """Several features, each as an ``embedding_bag``, looked up in one message per shard.

    ``features`` gives each its table, or a table and a mode; features may share one.
    """
    return EmbeddingBags(features, mode=mode, include_last_offset=include_last_offset, padding_id=padding_id)


def convert_embeddings(
    model: torch.nn.Module, *, min_rows: int = 10_000, optimizer: RowOptimizer | None = None
) -> torch.nn.Module:
    """Replace ``nn.Embedding`` and ``nn.EmbeddingBag`` with ``min_rows`` rows or more with tables.

    Their weights are the first values of the rows, uploaded by ``cluster.optimizer``; tables are named by the
    modules' paths. Modules that share a weight share a table. Frozen embeddings, and those whose weight another
    layer uses, are left as they are. Returns the model, which is changed in place. Raises InvalidRequest for an
    embedding that cannot become a table.
    """
    return convert(model, min_rows, optimizer)
