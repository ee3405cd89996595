"""What is logged of a shard, and the interface every log keeps.

Applying is deterministic, so the records of a model in order, applied to nothing, give its parameters again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ps_protocol.model import ShardMap
from ps_protocol.tables import Ids
from ps_server.consistency import PushInfo, TrackerMemento
from ps_server.optimizers import Region, StateEntry, Step
from ps_server.tables import BucketContents


@dataclass(frozen=True, slots=True)
class Placed:
    """A model lies on this shard from now on; it has no values yet."""

    shard_map: ShardMap


@dataclass(frozen=True, slots=True)
class Loaded:
    """Values or optimizer state were written; what is None stays."""

    model: str
    region: Region | None
    entries: Sequence[StateEntry] | None
    #: Where the job stood, when a checkpoint was restored.
    tracker: TrackerMemento | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step of one model on one shard."""

    model: str
    #: Version after this update.
    version: int
    #: The pushes it was made of, in rank order; more than one in sync mode only.
    pushes: tuple[PushInfo, ...]
    #: They were a round of sync mode.
    is_round: bool
    #: Their mean, and the buffers that count. Its memory is reused after ``append``.
    step: Step


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model will lie as in the next shard map, if the cluster decides so; slices that stay keep what they have."""

    #: One epoch on.
    shard_map: ShardMap
    #: Indexes, in the next layout of this shard, of the slices that come.
    incoming: tuple[int, ...]
    #: Their bytes, one after another.
    values: memoryview
    #: Their optimizer state, under their next indexes.
    entries: Sequence[StateEntry]
    #: What the shards they come from know of pushes; None: nothing comes.
    tracker: TrackerMemento | None = None
    #: Buckets that come, by number of their table.
    buckets: Sequence[tuple[int, BucketContents]] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of values, state and rows."""
        rows = sum(contents.nbytes for _, contents in self.buckets)
        return len(self.values) + sum(tensor.nbytes for _, tensor in self.entries) + rows


@dataclass(frozen=True, slots=True)
class Switched:
    """What was prepared for this epoch holds."""

    model: str
    epoch: int


@dataclass(frozen=True, slots=True)
class RowsLoaded:
    """Rows of a table were written from outside of training."""

    model: str
    table: int
    ids: Ids
    #: float32 [n, dim], or [n, width] with the optimizer's state.
    rows: npt.NDArray[np.float32]
    with_state: bool
    #: Rows that are there are left alone.
    only_new: bool


@dataclass(frozen=True, slots=True)
class RowsDropped:
    """Rows of a table went, and ids that waited for one."""

    model: str
    table: int
    ids: Ids
    waiting: Ids


@dataclass(frozen=True, slots=True)
class BucketsPut:
    """Buckets of tables hold what is told, and nothing else."""

    model: str
    #: By number of a table.
    contents: Sequence[tuple[int, BucketContents]]


RowsEntry = RowsLoaded | RowsDropped | BucketsPut
Entry = Placed | Loaded | Update | Prepared | Switched | RowsEntry


class UpdateLog(Protocol):
    """One per shard, for all of its models.

    ``append`` is called from the lane, in order, *before* an update or a switch is made and after a placement or load:
    what is applied has been logged, and what cannot be logged is not applied. The rest is called from the event loop.
    """

    @property
    def number(self) -> int:
        """The last entry; exact in the lane."""

    @property
    def waits(self) -> bool:
        """Whether ``append`` waits for a disk, so that it must not run on the event loop."""

    @property
    def keeps(self) -> bool:
        """Whether ``append`` writes what it is given, which must not change meanwhile; exact in the lane."""

    async def space(self, nbytes: int) -> None:
        """Wait while a snapshot would have to be made before an update of ``nbytes`` bytes. Raises StorageFull."""

    async def reserve(self, nbytes: int) -> None:
        """Have room for a record of ``nbytes`` bytes. Raises StorageFull; then nothing is reserved."""

    def release(self, nbytes: int) -> None:
        """End a reservation, whether or not it was used."""

    def check_bound(self, model: str, nbytes: int) -> None:
        """Raises ConfigError when updates of ``nbytes`` bytes need more disk space than the log was given."""

    def append(self, entry: Entry) -> int:
        """Take one entry; returns its number, from 1. Raising stops the model."""


class MemoryLog:
    """Durability "memory": the arenas are the only copy, nothing is kept."""

    waits = keeps = False

    def __init__(self) -> None:
        self.number = 0

    async def space(self, nbytes: int) -> None:
        """Nothing is kept within bounds."""

    async def reserve(self, nbytes: int) -> None:
        """There is always room for nothing."""

    def release(self, nbytes: int) -> None:
        """Nothing was reserved."""

    def check_bound(self, model: str, nbytes: int) -> None:
        """Nothing takes no space."""

    def append(self, entry: Entry) -> int:
        """Keep nothing."""
        self.number += 1
        return self.number
