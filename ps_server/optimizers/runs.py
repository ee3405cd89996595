"""Cuts parameter arenas where the presence of gradients changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import DType, Kind


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
