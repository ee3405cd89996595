"""The layout of a shard's slices in bytes: worker and shard compute the same one.

A shard's slices of one model form a *region*. It holds one arena per (kind, group, dtype) of the model, parameters
before buffers, each arena starting at a multiple of 64 bytes, each holding its slices in the order of the shard map.
Every slice begins at a multiple of the shard map's alignment; the zeros behind it, its padding, are sent with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ps_protocol.model.spec import ALIGNMENT_BYTES, DType, Kind, ModelSpec, ShardMap, Slice, Variable

#: Byte positions [begin, end) in a region.
Range = tuple[int, int]

#: Slices by index.
Indexes = frozenset[int] | tuple[int, ...]

_CACHED_PATTERNS = 64
"""Steps show few patterns of slices that are left out, mostly one."""


@dataclass(frozen=True, slots=True)
class ArenaKey:
    """What the slices of one arena have in common."""

    kind: Kind
    group: int
    dtype: DType


@dataclass(frozen=True, slots=True)
class SliceSpan:
    """One slice and its bytes [begin, end) in the region."""

    slice: Slice
    variable: Variable
    arena: int
    begin: int
    end: int
    #: Byte behind the slice's padding, where the next one begins.
    padded_end: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice as a tensor of its own."""
        rows = self.slice.row_end - self.slice.row_begin
        return (rows, *self.variable.shape[1:]) if self.variable.shape else ()


@dataclass(frozen=True, slots=True)
class ArenaSpan:
    """One arena and its bytes [begin, end) in the region, padding included; empty where the shard has no such slice."""

    key: ArenaKey
    begin: int
    end: int


def arena_keys(spec: ModelSpec) -> list[ArenaKey]:
    """The arenas of a model, the same on every shard: parameters first, by group, then dtype."""
    keys = {ArenaKey(v.kind, v.group, v.dtype) for v in spec.variables}
    return sorted(keys, key=lambda k: (k.kind is Kind.BUFFER, k.group, k.dtype.value))


@dataclass(frozen=True)
class Layout:
    """The region of one shard: arenas and slices with their byte positions."""

    shard_map: ShardMap
    shard: int
    arenas: tuple[ArenaSpan, ...]
    #: The shard's slices in region order; "slice index" on the wire is a position in this tuple.
    slices: tuple[SliceSpan, ...]
    #: Bytes of the parameter arenas, which come first.
    parameter_bytes: int
    region_bytes: int
    #: For each of the model's tables, its buckets on the shard, rising.
    buckets: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, shard_map: ShardMap, shard: int) -> Layout:
        """Lay out the slices that ``shard_map`` gives to ``shard``."""
        variables = shard_map.spec.variables
        keys = arena_keys(shard_map.spec)
        members: dict[ArenaKey, list[Slice]] = {key: [] for key in keys}
        for piece in shard_map.slices:
            if piece.shard == shard:
                v = variables[piece.variable]
                members[ArenaKey(v.kind, v.group, v.dtype)].append(piece)
        arenas: list[ArenaSpan] = []
        spans: list[SliceSpan] = []
        position = parameter_bytes = 0
        for number, key in enumerate(keys):
            begin = position = aligned(position)
            for piece in members[key]:
                v = variables[piece.variable]
                end = position + (piece.row_end - piece.row_begin) * v.row_bytes
                padded_end = aligned(end, shard_map.alignment_bytes)
                spans.append(SliceSpan(piece, v, number, position, end, padded_end))
                position = padded_end
            arenas.append(ArenaSpan(key, begin, position))
            if key.kind is Kind.PARAMETER:
                parameter_bytes = position
        buckets = tuple(tuple(shard_map.buckets(table, shard)) for table in range(len(shard_map.tables)))
        return cls(shard_map, shard, tuple(arenas), tuple(spans), parameter_bytes, position, buckets)

    @property
    def holds_any(self) -> bool:
        """Whether the shard has any part of the model."""
        return bool(self.slices) or any(self.buckets)

    @cached_property
    def largest_bytes(self) -> int:
        """Bytes of a region with every slice of the model: no move makes this one larger."""
        shard_map, variables = self.shard_map, self.shard_map.spec.variables
        sizes = ((piece.row_end - piece.row_begin) * variables[piece.variable].row_bytes for piece in shard_map.slices)
        return sum(aligned(size) for size in sizes) + ALIGNMENT_BYTES * len(self.arenas)

    @cached_property
    def largest_arenas(self) -> tuple[int, ...]:
        """Bytes of each arena with every such slice of the model: no move makes it larger."""
        variables, sizes = self.shard_map.spec.variables, {arena.key: 0 for arena in self.arenas}
        for piece in self.shard_map.slices:
            v = variables[piece.variable]
            nbytes = (piece.row_end - piece.row_begin) * v.row_bytes
            sizes[ArenaKey(v.kind, v.group, v.dtype)] += aligned(nbytes, self.shard_map.alignment_bytes)
        return tuple(sizes.values())

    @cached_property
    def parameter_slices(self) -> int:
        """How many of ``slices`` are parameters; they come first."""
        return sum(span.variable.kind is Kind.PARAMETER for span in self.slices)

    def ranges(self, absent: Iterable[int] = (), *, parameters: bool = True, buffers: bool = True) -> list[Range]:
        """Byte ranges of the present slices and their padding, merged where they touch.

        ``absent`` holds slice indexes that are left out.
        """
        missing = frozenset(absent)
        if not missing:
            wanted: Sequence[Range] = [
                (a.begin, a.end) for a in self.arenas if (parameters if a.key.kind is Kind.PARAMETER else buffers)
            ]
        else:
            wanted = [
                (s.begin, s.padded_end)
                for i, s in enumerate(self.slices)
                if i not in missing and (parameters if s.variable.kind is Kind.PARAMETER else buffers)
            ]
        return merge(wanted)

    @cached_property
    def ranges_without(self) -> Callable[[Indexes, bool], Sequence[Range]]:
        """``ranges`` for what is absent and whether with buffers; the newest are kept."""
        return lru_cache(_CACHED_PATTERNS)(lambda absent, buffers: tuple(self.ranges(absent, buffers=buffers)))


def aligned(position: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """The first multiple of ``alignment_bytes`` from byte ``position`` on."""
    return -(-position // alignment_bytes) * alignment_bytes


def merge(ranges: Iterable[Range]) -> list[Range]:
    """Join ranges that touch, drop empty ones; the input is in order."""
    merged: list[Range] = []
    for begin, end in ranges:
        if begin == end:
            continue
        if merged and merged[-1][1] == begin:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged


def subtract(ranges: Iterable[Range], taken: Iterable[Range]) -> list[Range]:
    """What is left of ``ranges`` without ``taken``; both are in order, without overlaps of their own.

    Takes one pass over both.
    """
    left: list[Range] = []
    removed, at = list(taken), 0
    for begin, end in ranges:
        while at < len(removed) and removed[at][1] <= begin:
            at += 1
        # The last of these may reach into the next range.
        for number in range(at, len(removed)):
            first, last = removed[number]
            if first >= end:
                break
            at = number
            if begin < first:
                left.append((begin, first))
            begin = last
        if begin < end:
            left.append((begin, end))
    return left


def total_bytes(ranges: Iterable[Range]) -> int:
    """Sum of the lengths of ``ranges``."""
    return sum(end - begin for begin, end in ranges)
