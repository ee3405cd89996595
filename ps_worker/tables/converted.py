"""Replaces a model's large embeddings with tables."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from ps_protocol.errors import InvalidRequest
from ps_protocol.logs import EventLogger
from ps_worker.rows import RowOptimizer
from ps_worker.tables.modules import Embedding, EmbeddingBag
from ps_worker.tables.table import Table, TableModule, plain_name

logger = EventLogger("ps_worker")

Dense = nn.Embedding | nn.EmbeddingBag


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
    uses = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    embeddings = _large_embeddings(model, min_rows)
    of_embeddings = Counter(id(m.weight) for m in {id(m): m for m in embeddings.values()}.values())
    tables: dict[int, Table] = {}
    made: dict[int, TableModule] = {}
    for path, module in embeddings.items():
        weight, name = module.weight, plain_name(path)
        if not weight.requires_grad:
            continue
        if uses[id(weight)] > of_embeddings[id(weight)]:
            logger.warning(
                "model.options",
                "'%s' stays as it is: its weight is also used by a module that is not an embedding",
                name,
            )
            continue
        if id(weight) not in tables:
            tables[id(weight)] = _table(name or "embedding", module, optimizer)
        if id(module) not in made:
            made[id(module)] = _module(module, tables[id(weight)]).train(module.training)
        if not path:
            return made[id(module)]
        parent, _, attribute = path.rpartition(".")
        setattr(model.get_submodule(parent), attribute, made[id(module)])
    return model


def _large_embeddings(model: nn.Module, min_rows: int) -> dict[str, Dense]:
    """By path. Subclasses are left out: they may behave differently."""
    found = model.named_modules(remove_duplicate=False)
    dense = {path: m for path, m in found if isinstance(m, Dense) and type(m) in (nn.Embedding, nn.EmbeddingBag)}
    return {path: module for path, module in dense.items() if module.num_embeddings >= min_rows}


def _table(path: str, module: Dense, optimizer: RowOptimizer | None) -> Table:
    wrong = [
        f"{name}={value}"
        for name, value in (("max_norm", module.max_norm), ("scale_grad_by_freq", module.scale_grad_by_freq))
        if value
    ]
    if module.weight.dtype is not torch.float32:
        wrong.append(f"dtype {module.weight.dtype}")
    if wrong:
        raise InvalidRequest(
            "an embedding cannot become a table",
            variable=path,
            expected="float32, without max_norm and scale_grad_by_freq",
            actual=", ".join(wrong),
            remedy="raise min_rows above its size to leave it as it is, or change it",
        )
    table = Table(module.embedding_dim, name=path, optimizer=optimizer)
    table.initial = module.weight.detach()
    return table


def _module(module: Dense, table: Table) -> TableModule:
    made: Embedding | EmbeddingBag
    if isinstance(module, nn.Embedding):
        made = Embedding(table, padding_id=module.padding_idx)
    else:
        made = EmbeddingBag(
            table, mode=module.mode, include_last_offset=module.include_last_offset, padding_id=module.padding_idx
        )
    made.num_embeddings = module.num_embeddings
    return made
