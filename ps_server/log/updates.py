"""What one update is, and the interface every log of updates keeps.

Applying is deterministic, so the updates of a model in order, applied to its initial values, give its parameters again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ps_protocol.model import Options
from ps_server.consistency import PushInfo
from ps_server.optimizers import Region


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step of one model on one shard."""

    model: str
    #: Version after this update.
    version: int
    #: The pushes it was made of, in rank order; more than one in sync mode only.
    pushes: tuple[PushInfo, ...]
    #: Their mean, and the buffers of the first, in region layout. Valid during ``append`` only, then reused.
    gradients: Region
    #: Slice indexes without a gradient.
    absent: frozenset[int]
    #: Per group, the optimizer's arguments of this step.
    options: Sequence[Options]
    #: Factor on the learning rate of this step.
    scale: float


class UpdateLog(Protocol):
    """Called from the applier's lane, in order, once per update. Raising stops the model."""

    def append(self, update: Update) -> None:
        """Take one update that has just been applied."""


class MemoryLog:
    """Durability "memory": the arenas are the only copy, nothing is kept."""

    def append(self, update: Update) -> None:
        """Keep nothing."""
