"""What happens to gradients before their step: are they finite, their norm, clipping, the mean of several workers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import ArenaSpan, Layout
from ps_protocol.model.spec import DType, Kind
from ps_server.state.region import Region
from ps_server.tables.step import RowStep


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


_BLOCK_ELEMENTS = 1 << 17
"""Elements taken at a time: those of all tensors of a loop stay in the processor's cache."""

_EPSILON = 1e-6
"""As in torch: added to the norm."""


def squared_norm(gradients: Region, absent: frozenset[int], tables: Iterable[RowStep] = ()) -> float:
    """The sum of the squares of all gradients; slices in ``absent`` have none. NaN where one is NaN."""
    dense = (_squares(tensor) for tensor in _present(gradients, absent))
    return total([*dense, *(_squares(torch.from_numpy(rows.gradients).view(-1)) for rows in tables)])


def total(parts: Sequence[float]) -> float:
    """The sum of squared norms, the same in every order."""
    try:
        return math.fsum(parts)
    except OverflowError:
        return math.inf


def clip_factor(max_norm: float, squared: float) -> float:
    """The factor on gradients of this squared norm; 1 where they are not longer than ``max_norm``, NaN for NaN."""
    factor = max_norm / (math.sqrt(squared) + _EPSILON)
    return 1.0 if factor > 1.0 else factor


def scale_gradients(gradients: Region, absent: frozenset[int], factor: float) -> None:
    """Multiply all gradients of variables, in place; slices in ``absent`` keep the bytes they have."""
    for tensor in _present(gradients, absent):
        tensor.mul_(factor)


def _present(gradients: Region, absent: frozenset[int]) -> Iterator[Tensor]:
    for run in parameter_runs(gradients.layout, [absent]):
        if run.absent == (False,):
            yield gradients.tensor(run.begin, run.end, run.dtype)


def _squares(flat: Tensor) -> float:
    """The sum of squares of a flat tensor."""
    sums = []
    for begin in range(0, flat.numel(), _BLOCK_ELEMENTS):
        block = flat[begin : begin + _BLOCK_ELEMENTS].double()
        sums.append(float(torch.dot(block, block)))
    return total(sums)


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


def average_buffers(into: Region, values: Sequence[Region], weights: Sequence[float] | None = None) -> None:
    """Mean of floating-point buffers, maximum of the others (counters of batches seen), into ``into``.

    ``into`` may be the first of ``values``. ``weights``: as in ``average``.
    """
    for span in _buffer_arenas(into.layout):
        target, *parts = (region.tensor(span.begin, span.end, span.key.dtype) for region in (into, *values))
        if not target.is_floating_point():
            target.copy_(torch.stack(parts).amax(0))
        elif weights is None:
            _mean(target, parts, len(parts))
        else:
            _weighted_sum(target, parts, weights)


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
