"""Decides how a shard continues a model that it recovered, given the shard map of the cluster."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from ps_protocol.errors import InvalidRequest, ModelMismatch, ModelMoved
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import ShardMap
from ps_server.model_differences import in_policies, in_structure, raise_differences


class Reconciliation(enum.Enum):
    """What becomes of a recovered model."""

    #: The shard map is the same.
    KEEP = enum.auto()
    #: The staged reshard was decided: the shard was lost before it was told.
    RESHARD = enum.auto()
    #: All slices have moved away meanwhile: what was recovered is dropped.
    RESET = enum.auto()


def reconcile(shard: int, held: ShardMap, pending: ShardMap | None, placed: ShardMap) -> Reconciliation:
    """How to get from ``held``, for which ``pending`` may have been staged, to ``placed``.

    The coordinator decides: a move is made only when every shard is the process that staged it. Raises
    ModelMismatch when the directory holds a model that is not the one the cluster has placed.
    """
    name = placed.spec.name
    raise_differences(
        f"the data directory of shard {shard} holds another model under the name '{name}'",
        in_structure(held.spec, placed.spec),
        "run the script that trained it, give the model another name, or use an empty --data-dir",
    )
    if _same(held, placed):
        # Updates in the log are as the directory's model has them.
        raise_differences(
            f"the data directory of shard {shard} holds model '{name}' with other arguments",
            in_policies(held.spec, placed.spec),
            "run the script with the arguments that it began with, or restore a checkpoint into empty data directories",
        )
        return Reconciliation.KEEP
    if pending is not None and _same(pending, placed):
        return Reconciliation.RESHARD
    if placed.epoch > held.epoch and not Layout.of(placed, shard).holds_any:
        return Reconciliation.RESET
    raise ModelMismatch(
        f"the data directory of shard {shard} holds model '{name}' cut for another cluster",
        shard=str(shard),
        expected=f"{placed.shards} shards, epoch {placed.epoch}",
        actual=f"{held.shards} shards, epoch {held.epoch}",
        remedy="the coordinator's journal is older than this directory: restore its newest copy, or restore a "
        "checkpoint into empty data directories"
        if placed.epoch < held.epoch
        else "start as many shards as before, or restore a checkpoint into empty data directories",
    )


def check_fits(shard: int, placed: ShardMap, held: Iterable[ShardMap], most_bytes: int) -> None:
    """Raises InvalidRequest when ``shard`` would hold more than ``most_bytes`` of values, with ``placed``."""
    added, before = nbytes_on(shard, placed), sum(nbytes_on(shard, each) for each in held)
    if added and added + before > most_bytes:
        raise InvalidRequest(
            f"model '{placed.spec.name}' does not fit on shard {shard}",
            shard=str(shard),
            expected=f"at most {most_bytes} bytes of values of all models: --max-model-bytes of ps-server",
            actual=f"{added} bytes, and {before} of other models",
            remedy="begin the job with more shards, or raise --max-model-bytes where there is the memory",
        )


def nbytes_on(shard: int, placed: ShardMap) -> int:
    """Of the values of variables on ``shard``."""
    variables = placed.spec.variables
    pieces = (each for each in placed.slices if each.shard == shard)
    return sum((each.row_end - each.row_begin) * variables[each.variable].row_bytes for each in pieces)


def moved_on(shard: int, model: str, known: int, asked: int) -> ModelMoved:
    """The error for a caller with an earlier shard map than this shard."""
    return ModelMoved(
        f"slices of model '{model}' have moved",
        shard=str(shard),
        expected=f"shard map of epoch {known}",
        actual=f"epoch {asked}",
        remedy="ask the coordinator for the shard map again",
    )


def _same(first: ShardMap, second: ShardMap) -> bool:
    return (first.shards, first.epoch, first.slices, first.tables) == (
        second.shards,
        second.epoch,
        second.slices,
        second.tables,
    )
