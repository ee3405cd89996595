"""A model without workers here, as snapshots copy it: one that a standby follows, or that waits to be placed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ps_protocol.model.layout import Layout
from ps_server.log.manifest import ModelPart
from ps_server.optimizers.state import StateEntry
from ps_server.shard.execution.executor import INLINE_WORK_BYTES, ShardExecutor
from ps_server.shard.reconcile import moved_on
from ps_server.state.blocks import Block
from ps_server.state.bucket_groups import Group, Wanted, copy_group
from ps_server.state.model_state import ModelState


@dataclass(frozen=True, slots=True)
class PassiveReplica:
    """Used by the snapshotter, on the event loop; copies are made in the executor, between two chunks of records."""

    model: ModelState
    executor: ShardExecutor
    #: The last record applied; asked in the executor.
    number: Callable[[], int]

    @property
    def layout(self) -> Layout:
        """The layout of its bytes."""
        return self.model.replica.layout

    @property
    def loads(self) -> int:
        """Records that replaced values or state."""
        return self.model.loads

    @property
    def is_pending(self) -> bool:
        """Whether it waits for the record of the decision on its next shard map."""
        return self.model.pending is not None

    async def describe(self) -> ModelPart:
        """Where it stands. Raises ModelMoved, as ``copy_block``."""
        model = self.model

        def work() -> ModelPart:
            self._check()
            return ModelPart(model.shard_map, model.initialised, model.tracker.persisted_state(), self.number())

        return await self.executor.submit(work, 1 << 62)

    async def copy_block(self, block: Block, into: memoryview) -> tuple[int, memoryview, list[StateEntry]]:
        """The last record in a copy of one block, its values, its optimizer state."""
        replica = self.model.replica

        def work() -> tuple[int, memoryview, list[StateEntry]]:
            self._check()
            return self.number(), *replica.copy_block(block, into)

        return await self.executor.submit(work, block.end - block.begin)

    async def copy_buckets(self, wanted: Wanted) -> tuple[int, Group]:
        """The last record in copies of the next buckets of ``wanted``, and these."""
        tables = self.model.replica.tables

        def work() -> tuple[int, Group]:
            self._check()
            return self.number(), copy_group(tables, wanted)

        return await self.executor.submit(work, INLINE_WORK_BYTES)

    def _check(self) -> None:
        if self.model.moved:
            held = self.model.shard_map
            raise moved_on(self.layout.shard, held.spec.name, held.epoch + 1, held.epoch)
