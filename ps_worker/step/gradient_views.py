"""Finds where the gradients of a model are in the memory that pushes are sent from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ps_protocol.model.layout import Range
from ps_worker.memory.blocks import FlatMemory
from ps_worker.memory.plan import FlatPlan

Views = list[list[torch.Tensor]]
"""For each variable, views of its slices that have a block, in the order of its rows."""


def slice_views(
    plan: FlatPlan, blocks: Sequence[FlatMemory | None], devices: Sequence[torch.device]
) -> tuple[Views, list[list[Range]]]:
    """The views, and the rows of each. ``blocks`` by shard, ``devices`` by variable."""
    found: list[list[tuple[Range, torch.Tensor]]] = [[] for _ in plan.variables]
    for layout, block in zip(plan.layouts, blocks, strict=True):
        if block is None:
            continue
        for span in layout.slices:
            number = span.slice.variable
            view = block.view(devices[number], span.begin, span.variable.dtype, span.shape)
            found[number].append(((span.slice.row_begin, span.slice.row_end), view))
    for slices in found:
        slices.sort(key=lambda pair: pair[0])
    return [[view for _, view in slices] for slices in found], [[rows for rows, _ in slices] for slices in found]


def whole_views(
    plan: FlatPlan, blocks: Sequence[FlatMemory | None], devices: Sequence[torch.device], views: Views
) -> list[torch.Tensor | None]:
    """Of each variable with a place in ``devices``, the view of all of it: that of its only slice, or another one over
    slices that are neighbours.

    None: it has several places, or no block.
    """
    return [_whole_view(plan, blocks, device, views[number], number) for number, device in enumerate(devices)]


def _whole_view(
    plan: FlatPlan, blocks: Sequence[FlatMemory | None], device: torch.device, slices: list[torch.Tensor], number: int
) -> torch.Tensor | None:
    if number not in plan.unparted:
        return None
    shard, (begin, _) = plan.unparted[number]
    if (block := blocks[shard]) is None:
        return None
    variable = plan.variables[number]
    return slices[0] if len(slices) == 1 else block.view(device, begin, variable.dtype, variable.shape)
