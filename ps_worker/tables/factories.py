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
    """Make a module as ``nn.Embedding`` for ids of any value: ``cluster.embedding(16, name="user")``.

    Its rows are on the shards from ``Cluster.optimizer`` on.

    Args:
        table: Numbers of a row (``dim``) of a new table; or an existing table or module, whose rows are shared.
        padding_id: Id whose row is zero and stays so.
        **settings: Settings of a new table: ``name``, and the other arguments of ``ps_worker.tables.Table``.

    Raises:
        InvalidRequest: A setting is out of its range.
        UnsupportedOptimizer: No shard has such a row optimizer.
        ConfigError: A setting is unknown.
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
    """Make a module as ``nn.EmbeddingBag`` for ids of any value.

    Args:
        table: See ``embedding``.
        mode: "sum", "mean" or "max" of the rows of a bag.
        include_last_offset: The offsets end with the number of ids, as in torch.
        padding_id: Id that is in no bag.
        **settings: See ``embedding``.

    Raises:
        InvalidRequest: As ``embedding``.
        UnsupportedOptimizer: As ``embedding``.
        ConfigError: As ``embedding``, and for an unknown ``mode``.
    """
    return EmbeddingBag(table, mode=mode, include_last_offset=include_last_offset, padding_id=padding_id, **settings)


def embedding_bags(
    features: Mapping[str, Table | TableModule | tuple[Table | TableModule, str]],
    *,
    mode: str = "mean",
    include_last_offset: bool = False,
    padding_id: int | None = None,
) -> EmbeddingBags:
    """Make one module of several features, each as an ``embedding_bag``, looked up in one message per shard.

    Args:
        features: By name, the table of each feature, or the table and a mode of its own. Features may share a table.
        mode: "sum", "mean" or "max", for features without their own.
        include_last_offset: The offsets end with the number of ids, as in torch.
        padding_id: Id that is in no bag.

    Raises:
        InvalidRequest: There is no feature, or one has no table.
        ConfigError: Unknown ``mode``.
    """
    return EmbeddingBags(features, mode=mode, include_last_offset=include_last_offset, padding_id=padding_id)


def convert_embeddings(
    model: torch.nn.Module, *, min_rows: int = 10_000, optimizer: RowOptimizer | None = None
) -> torch.nn.Module:
    """Replace large ``nn.Embedding`` and ``nn.EmbeddingBag`` modules of a model with tables, in place.

    Their weights are the first values of the rows, uploaded by ``Cluster.optimizer``. Tables are named by the paths of
    the modules; modules that share a weight share a table. Frozen embeddings, and those whose weight another layer
    uses, are left as they are.

    Args:
        model: The model.
        min_rows: Replace embeddings with at least so many rows.
        optimizer: Row optimizer of the tables. None: ``rows.Adagrad()``.

    Returns:
        ``model``.

    Raises:
        InvalidRequest: An embedding cannot become a table.
    """
    return convert(model, min_rows, optimizer)
