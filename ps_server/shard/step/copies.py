"""Copies of one model's state while it is trained, for readers, snapshots and checkpoints; and the memory it takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ps_protocol.model.layout import Layout, SliceSpan
from ps_server.consistency import Tracker, TrackerState
from ps_server.log.manifest import ModelPart
from ps_server.optimizers.state import StateEntry
from ps_server.shard.step.gate import Gate
from ps_server.shard.step.published import Published
from ps_server.shard.step.working_copy import WorkingCopy
from ps_server.state.blocks import Block
from ps_server.state.lent_regions import LentRegions

if TYPE_CHECKING:
    from ps_server.state.bucket_groups import Group, Wanted


class CopiedModel(ABC):
    """What of a ShardModel others copy; on the shard's event loop, copied in the executor between two updates."""

    layout: Layout
    tracker: Tracker
    gate: Gate
    #: Regions that workers map and fill with gradients.
    lent: LentRegions
    _working: WorkingCopy

    @property
    @abstractmethod
    def initialised(self) -> bool:
        """Whether it has values."""

    @abstractmethod
    async def take_published(self, *, quick: bool = False) -> Published:
        """Parameters and buffers after everything decided so far, which the caller gives back once they are read.

        ``quick``: they are read from shared memory. Raises what stopped the model.
        """

    @asynccontextmanager
    async def published(self) -> AsyncIterator[Published]:
        """As ``take_published``, given back at the end of the block."""
        published = await self.take_published()
        try:
            yield published
        finally:
            published.give_back(quick=False)

    @asynccontextmanager
    async def save(self, slices: Collection[int] | None = None) -> AsyncIterator[tuple[Published, list[StateEntry]]]:
        """Values and a copy of the optimizer state, whole or of these slices, of one version."""
        self.gate.check()
        copied = self._working.state(slices)
        async with self.published() as published:
            yield published, await copied

    async def describe(self) -> ModelPart:
        """Where the model stands: what pushes it knows, and how far the log was when it knew them."""
        state, initialised = self.tracker.persisted_state(), self.initialised
        number = await self.gate.guard(self._working.number)
        return ModelPart(self.layout.shard_map, initialised, state, number)

    def known_pushes(self) -> TrackerState:
        """What a successor has to know of pushes: all but those whose round is open, which come again."""
        state, waiting = self.tracker.persisted_state(), self.tracker.rounds.open()
        # With those that changed nothing. A restart forgets them, but values that move here may hold them.
        known = (
            applied if decided.worker in waiting else decided
            for applied, decided in zip(state.standings, self.tracker.clocks(), strict=True)
        )
        return replace(state, standings=tuple(known))

    async def copy_block(self, block: Block, into: memoryview) -> tuple[int, memoryview, list[StateEntry]]:
        """A copy of one block, made between two updates: the last record it contains, values, optimizer state."""
        return await self.gate.guard(lambda: self._working.copy_block(block, into))

    async def copy_buckets(self, wanted: Wanted) -> tuple[int, Group]:
        """The last record in copies of the next buckets of ``wanted``, and these; none: there are no more."""
        return await self.gate.guard(lambda: self._working.copy_buckets(wanted))

    async def compact(self) -> None:
        """Some time after slices have left: give memory back that is not needed any more. Raises as WorkingCopy."""
        if not self.gate.engaged and not self.gate.closed:
            await self._working.compact()

    def touch(self, layout: Layout) -> None:
        """In a helper thread: have memory for the next ``layout``, so that a move need not wait for it.

        Raises OSError where the system has none.
        """
        self._working.touch(layout)
        self.lent.touch(layout.region_bytes)

    def state_bytes(self, slices: Sequence[SliceSpan]) -> int:
        """About what the optimizer's state of ``slices`` takes, which are not here yet."""
        return self._working.replica.state_bytes(slices)
