"""Reads what a checkpoint says of the job as a whole: its phase, where its data stands, its seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ps_protocol.errors import DamagedData
from ps_server.checkpoint import Checkpoint
from ps_server.checkpoint.sound import whole_number
from ps_server.coordinator.data_leases import DataLeases

T = TypeVar("T")

_MAX_SEED = (1 << 64) - 1


def saved_phase(checkpoint: Checkpoint) -> int:
    """Barriers that the job had passed. Raises DamagedData."""
    return _fact(checkpoint, "phase", _whole)


def saved_data(checkpoint: Checkpoint) -> DataLeases:
    """Where its datasets stood. Raises DamagedData."""
    return _fact(checkpoint, "data", DataLeases.restore)


def saved_seed(checkpoint: Checkpoint) -> int:
    """The job's common seed. Raises DamagedData."""
    return _fact(checkpoint, "seed", _whole)


def _whole(value: Any) -> int:
    if not whole_number(value, _MAX_SEED):
        raise ValueError(f"{value!r} is no number from 0 on")
    return int(value)


def _fact(checkpoint: Checkpoint, name: str, read: Callable[[Any], T]) -> T:
    try:
        return read(checkpoint.manifest.facts[name])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise DamagedData(
            f"{checkpoint.folder} does not say the {name} of its job",
            expected=f"the {name}, as a coordinator writes it",
            actual=repr(error)[:200],
            remedy="restore another checkpoint, or a copy of this one",
        ) from error
