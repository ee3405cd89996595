"""What is logged of a shard, and the interface every log keeps.

Applying is deterministic, so the records of a model in order, applied to nothing, give its parameters again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ps_protocol.model.spec import ShardMap
from ps_protocol.model.tables import Ids
from ps_server.consistency import PushInfo, TrackerState
from ps_server.optimizers.state import StateEntry
from ps_server.state.region import Region
from ps_server.state.replica import Step
from ps_server.tables.bucket_contents import BucketContents


@dataclass(frozen=True, slots=True)
class Placed:
    """A model is placed on this shard; it has no values yet."""

    shard_map: ShardMap


@dataclass(frozen=True, slots=True)
class Loaded:
    """Values or optimizer state were written; what is None stays."""

    model: str
    region: Region | None
    entries: Sequence[StateEntry] | None
    #: The state of the tracker, when a checkpoint was restored.
    tracker: TrackerState | None = None


@dataclass(slots=True)
class AppliedUpdate:
    """One optimizer step of one model on one shard. Not changed once made."""

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
class StagedReshard:
    """What a model needs for the next shard map, should the cluster decide so; slices that stay keep what they have."""

    #: One epoch on.
    shard_map: ShardMap
    #: Indexes, in the next layout of this shard, of the slices that come.
    incoming: tuple[int, ...]
    #: Their bytes, one after another.
    values: memoryview
    #: Their optimizer state, under their next indexes.
    entries: Sequence[StateEntry]
    #: What the shards they come from know of pushes; None: nothing comes.
    tracker: TrackerState | None = None
    #: Row buckets that come, by number of their table.
    buckets: Sequence[tuple[int, BucketContents]] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of values, state and rows."""
        rows = sum(contents.nbytes for _, contents in self.buckets)
        return len(self.values) + sum(tensor.nbytes for _, tensor in self.entries) + rows


@dataclass(frozen=True, slots=True)
class Resharded:
    """The cluster has decided: what was staged for this epoch holds."""

    model: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Released:
    """The cluster has released this model, unless the epoch of its shard map is above this one; it may not be here."""

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
    """Rows of a table were dropped, and ids that waited for one."""

    model: str
    table: int
    ids: Ids
    waiting: Ids


@dataclass(frozen=True, slots=True)
class BucketsPut:
    """Row buckets of tables hold these contents, and nothing else."""

    model: str
    #: By number of a table.
    contents: Sequence[tuple[int, BucketContents]]


RowsEntry = RowsLoaded | RowsDropped | BucketsPut
Entry = Placed | Loaded | AppliedUpdate | StagedReshard | Resharded | Released | RowsEntry


class UpdateLog(Protocol):
    """One per shard, for all of its models.

    ``append`` is called from the executor, in order, *before* an update or a reshard is made and after a placement or
    load: what is applied has been logged, and what cannot be logged is not applied. The rest is called from the event
    loop.
    """

    @property
    def number(self) -> int:
        """The last entry; exact in the executor."""

    @property
    def waits(self) -> bool:
        """Whether ``append`` waits for a disk, so that it must not run on the event loop."""

    @property
    def keeps(self) -> bool:
        """Whether ``append`` writes what it is given, which must not change meanwhile; exact in the executor."""

    async def space(self, nbytes: int) -> None:
        """Wait while a snapshot would have to be made before an update of ``nbytes`` bytes. Raises StorageFull."""

    async def reserve(self, nbytes: int) -> None:
        """Have room for a record of ``nbytes`` bytes. Raises StorageFull; then nothing is reserved."""

    def reserve_now(self, nbytes: int) -> bool:
        """Reserve room for a record of ``nbytes`` bytes where that needs no waiting, of ``space`` either."""

    def release(self, nbytes: int) -> None:
        """End a reservation, whether or not it was used."""

    def check_bound(self, model: str, nbytes: int) -> None:
        """Raises ConfigError when updates of ``nbytes`` bytes need more disk space than the log was given."""

    def append(self, entry: Entry) -> int:
        """Take one entry; returns its number, from 1. Raising stops the model."""

    def append_all(self, entries: Sequence[Entry]) -> None:
        """As ``append`` for each; a disk is waited for once."""


class MemoryLog:
    """Durability "memory": the arenas are the only copy, nothing is written."""

    waits = keeps = False

    def __init__(self) -> None:
        self.number = 0

    async def space(self, nbytes: int) -> None:
        """There is no limit."""

    async def reserve(self, nbytes: int) -> None:
        """Nothing is reserved."""

    def reserve_now(self, nbytes: int) -> bool:
        """Nothing is reserved, and nothing waited for."""
        return True

    def release(self, nbytes: int) -> None:
        """Nothing was reserved."""

    def check_bound(self, model: str, nbytes: int) -> None:
        """Nothing is written."""

    def append(self, entry: Entry) -> int:
        """Count the entry."""
        self.number += 1
        return self.number

    def append_all(self, entries: Sequence[Entry]) -> None:
        """Count the entries."""
        for entry in entries:
            self.append(entry)
