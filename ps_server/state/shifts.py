"""Moves slices inside one region to their places in the next layout, without a second region.

``Shift`` and ``shifts`` are those of any memory in which slices move, also that of optimizer state.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ps_protocol.model.layout import Layout
from ps_server.state.region import Region


@dataclass(frozen=True, slots=True)
class Shift:
    """Bytes [begin, end) of some memory that belong at ``target`` in its next layout."""

    begin: int
    end: int
    target: int


def shifts(wanted: Iterable[Shift]) -> list[Shift] | None:
    """The ``wanted`` shifts that move bytes, in an order in which none overwrites what a later one reads.

    ``wanted`` is in order of ``begin``. None: there is no such order, because slices change places with each other.
    """
    left: list[Shift] = []
    right: list[Shift] = []
    reached = 0
    for each in wanted:
        if each.target < reached:
            return None
        reached = each.target + each.end - each.begin
        if each.begin != each.target:
            # Order is kept: what goes to the left meets only the old places of what went before it, and so backwards.
            (left if each.target < each.begin else right).append(each)
    return left + right[::-1]


def slice_shifts(before: Layout, after: Layout, staying: Mapping[int, int]) -> list[Shift] | None:
    """``shifts`` of the slices of a region that stay: slice index before to slice index after."""
    pairs = ((before.slices[old], after.slices[new]) for old, new in sorted(staying.items()))
    return shifts(Shift(source.begin, source.end, target.begin) for source, target in pairs)


def shifted(region: Region, after: Layout, staying: Mapping[int, int]) -> Region | None:
    """``region`` in its next layout, with the bytes of ``staying`` in their places and zeros between slices.

    What is not in ``staying`` has any values. None, and nothing was changed: it takes another region. Raises OSError
    where the system has no memory, with nothing changed.
    """
    moves = slice_shifts(region.layout, after, staying)
    if moves is None or (target := region.relaid(after)) is None:
        return None
    address = target.data.data_ptr()
    for move in moves:
        # With the interpreter lock released; source and target may overlap.
        ctypes.memmove(address + move.target, address + move.begin, move.end - move.begin)
    kept = {new for old, new in staying.items() if region.layout.slices[old].begin == after.slices[new].begin}
    _clear(target, after, (index for index in range(len(after.slices)) if index not in kept))
    return target


def _clear(region: Region, layout: Layout, slices: Iterable[int]) -> None:
    """Zeros behind ``slices`` and between arenas."""
    gaps: Sequence[tuple[int, int]] = [
        *((layout.slices[index].end, layout.slices[index].padded_end) for index in slices),
        *((one.end, other.begin) for one, other in zip(layout.arenas, layout.arenas[1:], strict=False)),
    ]
    for begin, end in gaps:
        if begin < end:
            region.data[begin:end].zero_()
