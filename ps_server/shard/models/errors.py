"""What a shard says of a model that it cannot serve."""

from __future__ import annotations

from collections.abc import Iterable

from ps_protocol.errors import InternalError, ModelReleased, Unavailable, UnknownModel
from ps_protocol.model.spec import ShardMap


def unknown(shard: int, name: str, known: Iterable[str]) -> UnknownModel:
    """Nobody has declared it."""
    return UnknownModel(
        f"model '{name}' is not declared",
        shard=str(shard),
        expected=", ".join(sorted(known)) or "a declared model",
        remedy="declare it with cluster.optimizer(...) first",
    )


def released(shard: int, name: str) -> ModelReleased:
    """It was declared, and has been released."""
    return ModelReleased(
        f"model '{name}' was released",
        shard=str(shard),
        expected="a model that is held by the shards",
        actual="dropped, with its state",
        remedy="declare a model under this name again: cluster.optimizer(..., name=...)",
    )


def unheard(shard: int, name: str, epoch: int, known: int) -> Unavailable:
    """The caller knows a newer shard map, of this ``epoch``, than the shard, which has that of epoch ``known``."""
    return Unavailable(
        f"this shard has not heard of the newest shard map of model '{name}'",
        shard=str(shard),
        expected=f"epoch {epoch}" if epoch else "a shard map",
        actual=f"epoch {known}" if known else "none",
        remedy="see whether the shard can reach the coordinator",
    )


def unplaceable(shard: int, name: str, error: Exception) -> InternalError:
    """It cannot be placed here, because of ``error``."""
    return InternalError(
        f"model '{name}' cannot be placed on shard {shard}",
        shard=str(shard),
        actual=f"{type(error).__name__}: {error}",
        remedy="see the log of the shard",
    )


def left_out(shard: int, held: ShardMap, placed: ShardMap) -> InternalError:
    """Its slices moved from ``held`` to ``placed`` without this shard."""
    return InternalError(
        f"slices of model '{held.spec.name}' moved, and shard {shard} was not asked",
        shard=str(shard),
        expected=f"epoch {held.epoch}",
        actual=f"epoch {placed.epoch}",
        remedy="start this shard again: what was staged is in its log",
    )
