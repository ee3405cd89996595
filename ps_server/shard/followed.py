"""A model that nobody pushes to here, as snapshots copy it: one that a standby follows, or that waits to be placed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ps_protocol.layout import Layout
from ps_server.log import ModelPart, RecoveredModel
from ps_server.optimizers import Block, StateEntry
from ps_server.shard.bucket_groups import Group, Wanted, copy_group
from ps_server.shard.lane import INLINE_BYTES, Lane
from ps_server.shard.placing import moved_on


@dataclass(frozen=True, slots=True)
class FollowedModel:
    """Used by the snapshotter, on the event loop; copies are made in the lane, between two chunks of records."""

    model: RecoveredModel
    lane: Lane
    #: The last record applied; asked in the lane.
    number: Callable[[], int]

    @property
    def layout(self) -> Layout:
        """Where its bytes lie."""
        return self.model.replica.layout

    @property
    def loads(self) -> int:
        """Records that replaced values or state."""
        return self.model.loads

    @property
    def bound(self) -> bool:
        """Whether it waits for the record that says how it will lie."""
        return self.model.pending is not None

    async def describe(self) -> ModelPart:
        """Where it stands. Raises ModelMoved, as ``copy_block``."""
        model = self.model

        def work() -> ModelPart:
            self._check()
            return ModelPart(model.shard_map, model.initialised, model.tracker.memento(), self.number())

        return await self.lane.submit(work, 1 << 62)

    async def copy_block(self, block: Block, into: memoryview) -> tuple[int, memoryview, list[StateEntry]]:
        """The last record in a copy of one block, its values, its optimizer state."""
        replica = self.model.replica

        def work() -> tuple[int, memoryview, list[StateEntry]]:
            self._check()
            values = into[: block.end - block.begin]
            values[:] = replica.region.bytes[block.begin : block.end]
            return self.number(), values, replica.state(block.slices)

        return await self.lane.submit(work, block.end - block.begin)

    async def copy_buckets(self, wanted: Wanted) -> tuple[int, Group]:
        """The last record in copies of the next buckets of ``wanted``, and these."""
        tables = self.model.replica.tables

        def work() -> tuple[int, Group]:
            self._check()
            return self.number(), copy_group(tables, wanted)

        return await self.lane.submit(work, INLINE_BYTES)

    def _check(self) -> None:
        if self.model.moved:
            held = self.model.shard_map
            raise moved_on(self.layout.shard, held.spec.name, held.epoch + 1, held.epoch)
