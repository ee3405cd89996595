"""Owns one model's values and optimizer state on one shard: the only thing that steps and loads change."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import InvalidRequest, UnsupportedOptimizer
from ps_protocol.model.layout import Layout, SliceSpan
from ps_protocol.model.spec import Options
from ps_server import tables as row_tables
from ps_server.optimizers.gradients import assign_buffers, blend_buffers
from ps_server.optimizers.shard_optimizer import ShardOptimizer
from ps_server.optimizers.state import StateEntry, StateKey
from ps_server.optimizers.undo import StepSkipped, skipped_step
from ps_server.state.blocks import Block
from ps_server.state.region import Region
from ps_server.tables.row_memory import RowMemory
from ps_server.tables.step import RowStep

#: By number of a table: whether each of its buckets is left alone.
Skipped = Mapping[int, npt.NDArray[np.bool_]]

_NOTHING: Skipped = {}


@dataclass(slots=True)
class Step:
    """One optimizer step, whole: the same steps in the same order make the same bytes. Not changed once made."""

    #: Gradients, and buffers where ``buffer_weight`` is not 0, in region layout. Valid while the step is made.
    gradients: Region
    #: Slice indexes without a gradient.
    absent: frozenset[int]
    #: Per group, the optimizer's arguments of this step.
    options: Sequence[Options]
    #: Factor on the learning rate.
    scale: float = 1.0
    #: How far kept buffers move to those in ``gradients``: 1 replaces them, 0 leaves them.
    buffer_weight: float = 0.0
    #: Rows of the tables that take part.
    tables: Sequence[RowStep] = ()
    #: Where the gradients, clipped, are part of a step over several shards: their squared norm here before that.
    squared_norm: float | None = None


class Replica:
    """The values and optimizer state of one model on one shard.

    The shard's executor, recovery or a standby calls it, one call at a time, from any thread.
    """

    def __init__(self, layout: Layout, region: Region | None = None, row_memory: RowMemory | None = None) -> None:
        """``region``: memory with the values; None: new memory, zeroed. ``row_memory``: a limit for rows of tables.

        Raises UnsupportedOptimizer or InvalidRequest as ``validate`` does.
        """
        self.layout = layout
        self.region = region or Region(layout)
        self._optimizer = ShardOptimizer(layout, self.region)
        specs = layout.shard_map.spec.tables
        #: One for each of the model's tables, with the buckets that are here.
        pairs = zip(specs, layout.buckets, strict=True)
        self.tables = [row_tables.ShardTable(spec, buckets, row_memory) for spec, buckets in pairs]

    def apply(
        self, step: Step, *, without: frozenset[int] = frozenset(), buffers: bool = True, skipped: Skipped = _NOTHING
    ) -> None:
        """Make one step. ``without`` names slices, ``buffers=False`` the buffers, and ``skipped`` buckets of tables,
        that have made it already.

        Raises StepSkipped for a step that raised, with nothing changed; any other error may leave half of it.
        """
        if step.tables:
            self._check_rows(step)
        try:
            self._optimizer.apply(step.gradients, step.absent | without, step.options, step.scale)
        except StepSkipped:
            raise
        except (UnsupportedOptimizer, InvalidRequest) as error:  # before anything was changed
            raise skipped_step(error, self.layout.shard_map.spec.optimizer) from error
        if step.tables:
            self.apply_rows(step, skipped)
        if not step.buffer_weight or not buffers:
            return
        if step.buffer_weight == 1.0:
            assign_buffers(self.region, step.gradients)
        else:
            blend_buffers(self.region, step.gradients, step.buffer_weight)

    def _check_rows(self, step: Step) -> None:
        """Check the arguments of rows before anything changes: updates of rows do not raise afterwards."""
        for rows in step.tables:
            spec = self.tables[rows.table].spec
            try:
                row_tables.prepared(spec, rows, step.scale)
            except (ArithmeticError, ValueError, TypeError, LookupError) as error:
                raise skipped_step(error, f"row optimizer '{spec.optimizer}' of table '{spec.name}'") from error

    def apply_rows(self, step: Step, skipped: Skipped = _NOTHING) -> None:
        """The part of ``apply`` that is the tables'."""
        for rows in step.tables:
            self.tables[rows.table].apply(rows, step.scale, skipped.get(rows.table))

    def be_careful(self) -> None:
        """From now on any step that raises can be undone, for the price of a copy of everything before each."""
        self._optimizer.careful = True

    def load(self, region: Region | None, entries: Sequence[StateEntry] | None) -> None:
        """Replace values, optimizer state, or both. Raises InvalidRequest, with nothing changed."""
        if entries is not None:
            self._optimizer.load_state(entries)
        if region is not None:
            copy_region(region, self.region)

    def move(self, target: Region) -> Region:
        """Continue in a copy of the region, made in ``target``; returns the region left."""
        copy_region(self.region, target)
        self._optimizer.rebind(target)
        left, self.region = self.region, target
        return left

    def state(self, slices: Collection[int] | None = None) -> list[StateEntry]:
        """A copy of the optimizer's state, whole or of these slices."""
        return [
            (StateKey(key.slice_index, key.name), tensor.clone())
            for key, tensor in self._optimizer.state()
            if slices is None or key.slice_index in slices
        ]

    def copy_block(self, block: Block, into: memoryview) -> tuple[memoryview, list[StateEntry]]:
        """A copy of one block: its values in the beginning of ``into``, and its optimizer state."""
        values = into[: block.end - block.begin]
        values[:] = self.region.bytes[block.begin : block.end]
        return values, self.state(block.slices)

    def follow(self, before: Replica, staying: Mapping[int, int], entries: Sequence[StateEntry]) -> None:
        """Take over the optimizer state of ``before``, which is not used any more: see ``ShardOptimizer.follow``."""
        self._optimizer.follow(before._optimizer, staying, entries)

    def touch(self, layout: Layout) -> None:
        """Allocate memory for the next ``layout``. From any thread. Raises OSError where there is no room."""
        self.region.touch(layout.region_bytes)
        self._optimizer.expect(layout)

    def state_bytes(self, slices: Sequence[SliceSpan]) -> int:
        """About how many bytes the optimizer's state of ``slices`` takes, of any layout. From any thread."""
        return self._optimizer.state_bytes(slices)

    def trim(self) -> None:
        """Give back memory for state of slices that have left."""
        self._optimizer.trim()


def copy_region(source: Region, target: Region) -> None:
    """Copy all bytes, with the interpreter lock released."""
    target.data.copy_(source.data)
