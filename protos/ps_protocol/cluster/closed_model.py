"""A model that a worker uses no more."""

from __future__ import annotations

from dataclasses import dataclass

from ps_protocol.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ClosedModelAsk:
    """What a worker asks when it has closed a model."""

    model: str
    #: Of the shard map that it has; tells the model from another one of this name.
    epoch: int
    #: Drop the model on all shards, with the last worker that uses it.
    release: bool

    def __post_init__(self) -> None:
        if not self.epoch:
            raise InvalidRequest("a model that was closed had a shard map", expected="its epoch, from 1", actual="0")
