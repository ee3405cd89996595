"""A model that a worker uses no more."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClosedModelAsk:
    """What a worker asks when it has closed a model."""

    model: str
    #: Of the shard map that it has; tells the model from another one of this name.
    epoch: int
    #: Drop the model on all shards, with the last worker that uses it.
    release: bool
