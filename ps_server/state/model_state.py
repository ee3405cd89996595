"""One model of a shard as records make it: recovered from disk, held by a standby, or about to be resharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import Consistency, ShardMap
from ps_server.consistency import Tracker
from ps_server.log.entries import StagedReshard
from ps_server.log.messages import LoggedOptions
from ps_server.state.blocks import Block
from ps_server.state.region import Region
from ps_server.state.replica import Replica, Skipped
from ps_server.tables.row_memory import RowMemory


@dataclass(slots=True, eq=False)
class ModelState:
    """One model as it was, with its tracker; owned by the process that continues it."""

    shard_map: ShardMap
    replica: Replica
    tracker: Tracker
    initialised: bool = False
    #: Blocks that came from a snapshot, with the last record each contains.
    blocks: Sequence[tuple[Block, int]] = ()
    #: Where buckets came from a snapshot: by table, the last record that each contains; the highest number there is for
    #: one on another shard.
    buckets: Mapping[int, npt.NDArray[np.int64]] = field(default_factory=dict)
    #: The last record that ``tracker`` contains.
    tracker_number: int = 0
    options: LoggedOptions = field(default_factory=LoggedOptions)
    #: Records that replaced values or state.
    loads: int = 0
    #: The next shard map and what came for it; whether it holds is not known yet.
    pending: StagedReshard | None = None
    #: Whether no answer on its way reads its region, which nothing may change then; may wait for those that do.
    unread: Callable[[], bool] = lambda: True
    #: Another one has taken its place, by another shard map, or none has.
    moved: bool = False
    _gradients: Region | None = None

    @property
    def gradients(self) -> Region:
        """Memory for one update's gradients."""
        self._gradients = self._gradients or Region(self.replica.layout)
        return self._gradients

    def contains(self, number: int) -> bool:
        """Whether every part of it, taken from a snapshot, was made after record ``number``."""
        known = all(number <= known for _, known in self.blocks)
        return number <= self.tracker_number and known and all(bool((n >= number).all()) for n in self.buckets.values())

    def skipped(self, number: int) -> Skipped:
        """The buckets that contain record ``number`` already."""
        return {table: numbers >= number for table, numbers in self.buckets.items()}


def new_model(shard_map: ShardMap, shard: int, row_memory: RowMemory | None = None) -> ModelState:
    """A model that has just been placed. Without a slice on this shard it is complete.

    ``row_memory``: above it, rows of tables are on disk.
    """
    layout = Layout.of(shard_map, shard)
    return ModelState(
        shard_map,
        Replica(layout, row_memory=row_memory),
        Tracker(Consistency()),
        initialised=not layout.holds_any,
    )
