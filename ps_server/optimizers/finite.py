"""Decides whether gradients are finite, at the speed of memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ps_protocol.model.layout import Layout
from ps_server.optimizers.runs import parameter_runs
from ps_server.state.region import Region


def first_nonfinite(layout: Layout, region: Region, absent: frozenset[int] = frozenset()) -> str | None:
    """Name of the first variable whose gradient holds a NaN or an infinity; None when all are finite.

    Slices in ``absent`` are not looked at. Reads each byte once and allocates nothing of the region's size.
    """
    for run in parameter_runs(layout, [absent]):
        if run.absent == (False,) and not _finite(region.flat(run.begin, run.end, run.dtype)):
            named = (
                span.variable.name
                for index, span in enumerate(layout.slices)
                if span.arena == run.arena and index not in absent and not _finite(region.slice(index))
            )
            # None of them: it is in the padding.
            if (name := next(named, None)) is not None:
                return name
    return None


def _finite(tensor: Tensor) -> bool:
    # A sum takes half of the time of the rest, passes NaN and infinity on, and overflows seldom.
    if tensor.numel() == 0 or math.isfinite(tensor.sum().item()):
        return True
    # Smallest and largest pass a NaN on and cannot overflow.
    smallest, largest = torch.aminmax(tensor)
    return bool(torch.isfinite(smallest) and torch.isfinite(largest))
