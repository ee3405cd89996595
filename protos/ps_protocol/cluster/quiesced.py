"""The position of a model on a paused shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ModelPosition:
    """The pushes of one model that a shard has accepted, or has to accept before it pauses."""

    model: str
    #: By rank and incarnation, the sequence of the last push accepted.
    accepted: Mapping[tuple[int, int], int]
    #: Of the last round applied in sync.
    phase: int = 0
    clock: int = 0
    #: By rank and incarnation, the sequence of the first accepted push whose round is still open.
    open: Mapping[tuple[int, int], int] = field(default_factory=dict)
