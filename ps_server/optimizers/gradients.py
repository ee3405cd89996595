"""What happens to gradients before their step: are they finite, their norm, clipping, the mean of several workers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Layout
from ps_protocol.wire.means import BLOCK_ELEMENTS, average_buffer_arenas, average_runs, buffer_arenas, parameter_runs
from ps_server.state.region import Region
from ps_server.tables.step import RowStep


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
    for begin in range(0, flat.numel(), BLOCK_ELEMENTS):
        block = flat[begin : begin + BLOCK_ELEMENTS].double()
        sums.append(float(torch.dot(block, block)))
    return total(sums)


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
    average_runs(into.layout, into.data, [part.data for part in parts], absent, weights)
    return frozenset.intersection(*absent)


def assign_buffers(region: Region, values: Region) -> None:
    """Copy the buffers of ``values``."""
    for span in buffer_arenas(region.layout):
        region.data[span.begin : span.end].copy_(values.data[span.begin : span.end])


def average_buffers(into: Region, values: Sequence[Region], weights: Sequence[float] | None = None) -> None:
    """Mean of floating-point buffers, maximum of the others (counters of batches seen), into ``into``.

    ``into`` may be the first of ``values``. ``weights``: as in ``average``.
    """
    average_buffer_arenas(into.layout, into.data, [each.data for each in values], weights)


def blend_buffers(region: Region, values: Region, weight: float) -> None:
    """Move floating-point buffers by ``weight`` of the way to ``values``; take the maximum of the others."""
    for span in buffer_arenas(region.layout):
        held, new = (r.tensor(span.begin, span.end, span.key.dtype) for r in (region, values))
        if held.is_floating_point():
            held.lerp_(new, weight)
        else:
            torch.maximum(held, new, out=held)
