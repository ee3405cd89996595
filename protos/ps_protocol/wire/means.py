"""The mean of gradients and buffers of several workers, in the layout of a shard's region.

A shard takes it over the pushes of a round, a worker over those of its host: both in rank order, by the same sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ps_protocol.model.layout import ArenaSpan, Layout
from ps_protocol.model.spec import DType, Kind

BLOCK_ELEMENTS = 1 << 17
"""Elements taken at a time: those of all tensors of a loop stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class ArenaRun:
    """Bytes [begin, end) of neighbouring slices of one arena, not empty."""

    arena: int
    begin: int
    end: int
    dtype: DType
    #: Per contribution, whether it lacks these slices.
    absent: tuple[bool, ...]


def parameter_runs(layout: Layout, absent: Sequence[frozenset[int]]) -> Iterator[ArenaRun]:
    """The parameter arenas, cut into runs. ``absent`` holds the missing slice indexes of each contribution."""
    if not any(absent):
        everywhere = (False,) * len(absent)
        for number, arena in enumerate(layout.arenas):
            if arena.key.kind is Kind.PARAMETER and arena.begin < arena.end:
                yield ArenaRun(number, arena.begin, arena.end, arena.key.dtype, everywhere)
        return
    indexes = (i for i in range(layout.parameter_slices) if layout.slices[i].begin < layout.slices[i].end)
    keyed = groupby(indexes, lambda i: (layout.slices[i].arena, tuple(i in missing for missing in absent)))
    for (number, missing), members in keyed:
        spans = [layout.slices[i] for i in members]
        yield ArenaRun(number, spans[0].begin, spans[-1].end, spans[0].variable.dtype, missing)


def shares(weights: Sequence[float]) -> list[float] | None:
    """What part of their mean each of ``weights``, positive and finite, has; None where they are equal."""
    largest = max(weights)
    if min(weights) == largest:
        return None
    # Divided first: the sum of large weights would overflow.
    scaled = [weight / largest for weight in weights]
    total = math.fsum(scaled)
    return [weight / total for weight in scaled]


def average_runs(
    layout: Layout,
    into: Tensor,
    parts: Sequence[Tensor],
    absent: Sequence[frozenset[int]],
    weights: Sequence[float] | None = None,
) -> None:
    """Write the mean of the gradients of ``parts`` to ``into``; all are bytes of regions of ``layout``.

    ``into`` may be the first part. ``absent`` holds the missing slice indexes of each part; a missing slice counts as
    zeros. ``weights`` are shares of the mean, one for each part; None: all parts weigh the same. The sum is taken in
    the order given, so the result is bitwise repeatable. float16 and bfloat16 are summed in float32 and rounded once.
    Slices that no part has keep the bytes they had.
    """
    for run in parameter_runs(layout, absent):
        present = [
            _tensor(part, run.begin, run.end, run.dtype)
            for part, missing in zip(parts, run.absent, strict=True)
            if not missing
        ]
        if present and weights is None:
            _mean(_tensor(into, run.begin, run.end, run.dtype), present, len(parts))
        elif present and weights is not None:
            own = [weight for weight, missing in zip(weights, run.absent, strict=True) if not missing]
            _weighted_sum(_tensor(into, run.begin, run.end, run.dtype), present, own)


def average_buffer_arenas(
    layout: Layout, into: Tensor, values: Sequence[Tensor], weights: Sequence[float] | None = None
) -> None:
    """Mean of floating-point buffers, maximum of the others (counters of batches seen), into ``into``.

    All are bytes of regions of ``layout``. ``into`` may be the first. ``weights``: as in ``average_runs``.
    """
    for span in buffer_arenas(layout):
        target, *parts = (_tensor(region, span.begin, span.end, span.key.dtype) for region in (into, *values))
        if not target.is_floating_point():
            target.copy_(torch.stack(parts).amax(0))
        elif weights is None:
            _mean(target, parts, len(parts))
        else:
            _weighted_sum(target, parts, weights)


def buffer_arenas(layout: Layout) -> Iterator[ArenaSpan]:
    """The arenas of buffers that are not empty."""
    return (span for span in layout.arenas if span.key.kind is Kind.BUFFER and span.begin < span.end)


def _tensor(region: Tensor, begin: int, end: int, dtype: DType) -> Tensor:
    found: Tensor = region[begin:end].view(getattr(torch, dtype.value))
    return found


def _weighted_sum(into: Tensor, parts: Sequence[Tensor], weights: Sequence[float]) -> None:
    """Sum ``parts`` times ``weights`` in order. ``into`` may be the first part, none of the others."""
    widen = into.dtype in (torch.float16, torch.bfloat16)
    for begin in range(0, into.numel(), BLOCK_ELEMENTS):
        first, *rest = (part[begin : begin + BLOCK_ELEMENTS] for part in parts)
        target = into[begin : begin + BLOCK_ELEMENTS]
        total = first.float().mul_(weights[0]) if widen else torch.mul(first, weights[0], out=target)
        for part, weight in zip(rest, weights[1:], strict=True):
            total.add_(part, alpha=weight)
        if widen:
            target.copy_(total)


def _mean(into: Tensor, parts: Sequence[Tensor], count: int) -> None:
    """Sum ``parts`` in order, divide by ``count``. ``into`` may be the first part, none of the others."""
    widen = into.dtype in (torch.float16, torch.bfloat16)
    for begin in range(0, into.numel(), BLOCK_ELEMENTS):
        first, *rest = (part[begin : begin + BLOCK_ELEMENTS] for part in parts)
        target = into[begin : begin + BLOCK_ELEMENTS]
        total = first.float() if widen else target.copy_(first)
        for part in rest:
            total.add_(part)
        total.div_(count)
        if widen:
            target.copy_(total)
