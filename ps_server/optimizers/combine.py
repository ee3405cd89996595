"""Decides how contributions of several workers become one: the mean of gradients, and the fate of buffers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import ArenaSpan, Layout
from ps_protocol.model.spec import Kind
from ps_server.optimizers.runs import parameter_runs
from ps_server.state.region import Region

#: Elements averaged at a time: the blocks of all contributions stay in the processor's cache.
_BLOCK_ELEMENTS = 1 << 17


def shares(weights: Sequence[float]) -> list[float] | None:
    """What part of their mean each of ``weights``, positive and finite, has; None where they are equal."""
    largest = max(weights)
    if min(weights) == largest:
        return None
    # Divided first: the sum of large weights would overflow.
    scaled = [weight / largest for weight in weights]
    total = math.fsum(scaled)
    return [weight / total for weight in scaled]


def average(
    into: Region,
    parts: Sequence[Region],
    absent: Sequence[frozenset[int]],
    weights: Sequence[float] | None = None,
) -> frozenset[int]:
    """Write the mean of the gradients of ``parts`` to ``into``; returns the slices that none of them has.

    ``into`` may be the first part. ``absent`` holds the missing slice indexes of each part; a missing slice counts as
    zeros. ``weights`` are shares of the mean, one for each part; None: all parts weigh the same. The sum is taken in
    the order given, so the result is bitwise repeatable. float16 and bfloat16 are summed in float32 and rounded once.
    Slices that no part has keep the bytes they had.

    Raises InvalidRequest when ``absent`` does not match the parts or there is none.
    """
    if len(absent) != len(parts) or not parts:
        raise InvalidRequest(
            "an average needs at least one part, and one set of absent slices for each",
            expected=f"{len(parts)} sets",
            actual=f"{len(absent)} sets",
        )
    for run in parameter_runs(into.layout, absent):
        present = [
            region.tensor(run.begin, run.end, run.dtype)
            for region, missing in zip(parts, run.absent, strict=True)
            if not missing
        ]
        if present and weights is None:
            _mean(into.tensor(run.begin, run.end, run.dtype), present, len(parts))
        elif present and weights is not None:
            own = [weight for weight, missing in zip(weights, run.absent, strict=True) if not missing]
            _weighted_sum(into.tensor(run.begin, run.end, run.dtype), present, own)
    return frozenset.intersection(*absent)


def assign_buffers(region: Region, values: Region) -> None:
    """Copy the buffers of ``values``."""
    for span in _buffer_arenas(region.layout):
        region.data[span.begin : span.end].copy_(values.data[span.begin : span.end])


def average_buffers(into: Region, values: Sequence[Region]) -> None:
    """Mean of floating-point buffers, maximum of the others (counters of batches seen), into ``into``.

    ``into`` may be the first of ``values``.
    """
    for span in _buffer_arenas(into.layout):
        target, *parts = (region.tensor(span.begin, span.end, span.key.dtype) for region in (into, *values))
        if target.is_floating_point():
            _mean(target, parts, len(parts))
        else:
            target.copy_(torch.stack(parts).amax(0))


def blend_buffers(region: Region, values: Region, weight: float) -> None:
    """Move floating-point buffers by ``weight`` of the way to ``values``; take the maximum of the others."""
    for span in _buffer_arenas(region.layout):
        held, new = (r.tensor(span.begin, span.end, span.key.dtype) for r in (region, values))
        if held.is_floating_point():
            held.lerp_(new, weight)
        else:
            torch.maximum(held, new, out=held)


def _buffer_arenas(layout: Layout) -> Iterator[ArenaSpan]:
    return (span for span in layout.arenas if span.key.kind is Kind.BUFFER and span.begin < span.end)


def _weighted_sum(into: Tensor, parts: Sequence[Tensor], weights: Sequence[float]) -> None:
    """Sum ``parts`` times ``weights`` in order. ``into`` may be the first part, none of the others."""
    widen = into.dtype in (torch.float16, torch.bfloat16)
    for begin in range(0, into.numel(), _BLOCK_ELEMENTS):
        first, *rest = (part[begin : begin + _BLOCK_ELEMENTS] for part in parts)
        target = into[begin : begin + _BLOCK_ELEMENTS]
        total = first.float().mul_(weights[0]) if widen else torch.mul(first, weights[0], out=target)
        for part, weight in zip(rest, weights[1:], strict=True):
            total.add_(part, alpha=weight)
        if widen:
            target.copy_(total)


def _mean(into: Tensor, parts: Sequence[Tensor], count: int) -> None:
    """Sum ``parts`` in order, divide by ``count``. ``into`` may be the first part, none of the others."""
    widen = into.dtype in (torch.float16, torch.bfloat16)
    for begin in range(0, into.numel(), _BLOCK_ELEMENTS):
        first, *rest = (part[begin : begin + _BLOCK_ELEMENTS] for part in parts)
        target = into[begin : begin + _BLOCK_ELEMENTS]
        total = first.float() if widen else target.copy_(first)
        for part in rest:
            total.add_(part)
        total.div_(count)
        if widen:
            target.copy_(total)
