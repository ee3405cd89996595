"""Decides which bytes of a region a codec may rewrite, and which travel as they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ps_protocol.layout import ArenaSpan, Layout
from ps_protocol.model import DType, Kind

#: 16-bit elements are small already, integers and buffers are to arrive exactly.
_CODED = frozenset({DType.FLOAT32, DType.FLOAT64})


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes [begin, end) of a region; never empty."""

    begin: int
    end: int
    #: Type of the elements; None for bytes that travel as they are.
    dtype: DType | None


def payload_runs(layout: Layout, absent: Iterable[int] = (), *, buffers: bool = True) -> tuple[Run, ...]:
    """The runs of a payload without the slices ``absent``: in region order, none across two arenas, none empty.

    They cover the bytes of ``layout.ranges(absent, buffers=buffers)``. The result depends on nothing else: keep it.
    """
    missing = frozenset(absent)
    if not missing:
        whole = [Run(a.begin, a.end, _coded(a)) for a in layout.arenas if buffers or a.key.kind is Kind.PARAMETER]
        return tuple(run for run in whole if run.begin < run.end)
    runs: list[Run] = []
    last_arena = -1
    for index, span in enumerate(layout.slices):
        if index in missing or span.begin == span.end or not (buffers or span.variable.kind is Kind.PARAMETER):
            continue
        if span.arena == last_arena and runs[-1].end == span.begin:
            runs[-1] = Run(runs[-1].begin, span.padded_end, runs[-1].dtype)
        else:
            runs.append(Run(span.begin, span.padded_end, _coded(layout.arenas[span.arena])))
        last_arena = span.arena
    return tuple(runs)


def _coded(arena: ArenaSpan) -> DType | None:
    """The element type of a run in ``arena``."""
    return arena.key.dtype if arena.key.kind is Kind.PARAMETER and arena.key.dtype in _CODED else None
