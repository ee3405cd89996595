"""Reads what a new job takes from a checkpoint: phase, data positions, seed, and the placement of its models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from ps_protocol.errors import DamagedData
from ps_protocol.model.spec import ShardMap
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.validation import whole_number
from ps_server.coordinator.data_leases import DataLeases
from ps_server.coordinator.placement.variables import as_before

T = TypeVar("T")

_MAX_SEED = (1 << 64) - 1


def saved_phase(checkpoint: Checkpoint) -> int:
    """Barriers that the job had passed. Raises DamagedData."""
    return _fact(checkpoint, "phase", _whole)


def saved_data(checkpoint: Checkpoint) -> DataLeases:
    """The positions in its datasets. Raises DamagedData."""
    return _fact(checkpoint, "data", DataLeases.restore)


def saved_seed(checkpoint: Checkpoint) -> int:
    """The job's common seed. Raises DamagedData."""
    return _fact(checkpoint, "seed", _whole)


def place_as_saved(checkpoint: Checkpoint, shard_map: ShardMap) -> ShardMap:
    """``shard_map`` placed as in the checkpoint: bit-equal on the same number of shards. Raises ModelMismatch."""
    checkpoint.check_matches(shard_map.spec)
    known = checkpoint.model(shard_map.spec.name).shard_map
    placed = as_before(shard_map, known) or checkpoint.aligned(shard_map)
    return replace(placed, restored_from=str(checkpoint.folder))


def _whole(value: Any) -> int:
    if not whole_number(value, _MAX_SEED):
        raise ValueError(f"{value!r} is not a number from 0")
    return int(value)


def _fact(checkpoint: Checkpoint, name: str, read: Callable[[Any], T]) -> T:
    try:
        return read(checkpoint.manifest.facts[name])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise DamagedData(
            f"{checkpoint.folder} does not hold the {name} of its job",
            expected=f"the {name}, as a coordinator writes it",
            actual=repr(error)[:200],
            remedy="restore another checkpoint, or a copy of this one",
        ) from error
