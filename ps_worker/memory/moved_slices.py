"""Keeps gradients of slices that have moved between shards until they are in the memory of the next layout."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch

from ps_protocol.model.layout import Layout, Range, SliceSpan, merge
from ps_worker.memory.blocks import HOST, FlatMemory

_Key = tuple[int, Range]
"""A slice, independent of its shard: its variable and its rows."""


class MovedSlices:
    """Used by GradientBuffers, in its thread. Slices that stay in place in the same memory are not copied."""

    def __init__(self) -> None:
        #: The gradients, as collected last, of slices that have no block yet.
        self._values: dict[_Key, torch.Tensor] = {}
        #: The blocks that shards had before.
        self._blocks: dict[int, FlatMemory] = {}

    def begin(
        self,
        views: Sequence[Sequence[torch.Tensor]],
        rows: Sequence[Sequence[Range]],
        blocks: Sequence[FlatMemory | None],
    ) -> None:
        """Begin after slices have moved. ``views``, ``rows``: of each variable's slices that have a block."""
        for number, (of_variable, spans) in enumerate(zip(views, rows, strict=True)):
            self._values.update({(number, span): view for view, span in zip(of_variable, spans, strict=True)})
        self._blocks.update({shard: block for shard, block in enumerate(blocks) if block is not None})

    def __bool__(self) -> bool:
        return bool(self._values)

    def own_memory(self, shard: int) -> torch.Tensor | None:
        """The worker's own host memory for ``shard``, to reuse; None if there is none, or the shard owns it."""
        block = self._blocks.pop(shard, None)
        return block.own if block is not None else None

    def bring(self, layout: Layout, block: FlatMemory, devices: Sequence[torch.device]) -> None:
        """Copy every slice of ``layout`` to its position in ``block``, which may be the memory that already contains
        it.
        """
        self._blocks.pop(layout.shard, None)
        copies: list[tuple[torch.Tensor, SliceSpan, _Key]] = []
        for span in layout.slices:
            key = (span.slice.variable, (span.slice.row_begin, span.slice.row_end))
            if (before := self._values.get(key)) is None:
                continue
            device = devices[span.slice.variable]
            target = block.view(device, span.begin, span.variable.dtype, span.shape)
            if device == HOST and before.data_ptr() == target.data_ptr():
                del self._values[key]
            else:
                copies.append((target, span, key))
        start = block.host.data_ptr()
        self._save_overwritten([(start + span.begin, start + span.padded_end) for _, span, _ in copies])
        for target, span, key in copies:
            target.copy_(self._values.pop(key))
            block.host[span.end : span.padded_end].zero_()
        block.to_host((0, layout.region_bytes))
        if not self._values:
            self._blocks.clear()

    def _save_overwritten(self, ranges: Sequence[Range]) -> None:
        """Copy the waiting slices of which a part is about to be overwritten. ``ranges``: addresses."""
        merged = merge(sorted(ranges))
        begins = [begin for begin, _ in merged]
        for key, value in self._values.items():
            # The last range that begins before its end; all earlier ranges end earlier.
            last = bisect_left(begins, value.data_ptr() + value.nbytes) - 1
            if last >= 0 and merged[last][1] > value.data_ptr():
                self._values[key] = value.clone()
