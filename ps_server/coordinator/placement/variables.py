"""The initial placement of a model: rows balanced by bytes, in few slices, and tables by buckets."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ps_protocol.model.spec import ALIGNMENT_BYTES, ModelSpec, ShardMap, Slice
from ps_server.coordinator.placement.tables import place_tables

LIMIT_PERCENT = 105
"""The largest shard is at most this many percent of the mean, unless single rows are too large for it."""

_SLICE_BYTES = 32 << 20
"""Upper limit of balanced slices where rows allow it: a push waits for the copy of a whole slice to disk."""


@dataclass(frozen=True, slots=True)
class Balanced:
    """Split only for balance, into as few slices as possible, of at most 32 MB."""


@dataclass(frozen=True, slots=True)
class FixedShards:
    """As TensorFlow's FixedShardsPartitioner: every variable in ``slices`` slices, or as many as it has rows."""

    slices: int


@dataclass(frozen=True, slots=True)
class MinSize:
    """As TensorFlow's MinSizePartitioner: slices of about ``min_slice_bytes``, at most ``max_slices`` of them."""

    min_slice_bytes: int = 256 << 10
    max_slices: int = 1


@dataclass(frozen=True, slots=True)
class MaxSize:
    """As TensorFlow's MaxSizePartitioner: no slice above ``max_slice_bytes``, but at most ``max_slices`` (0: any)."""

    max_slice_bytes: int
    max_slices: int = 0


PartitionRule = Balanced | FixedShards | MinSize | MaxSize


def first_map(spec: ModelSpec, shards: Sequence[int], rule: PartitionRule) -> ShardMap:
    """The initial shard map of ``spec``, over the shards with these ascending numbers."""
    slices = (replace(piece, shard=shards[piece.shard]) for piece in place(spec, len(shards), rule))
    return ShardMap(1, spec, shards[-1] + 1, tuple(slices), tables=place_tables(spec.tables, shards))


def as_before(shard_map: ShardMap, known: ShardMap) -> ShardMap | None:
    """``shard_map`` with the placement of ``known``; None when variables or the number of shards differ.

    Shards may have different numbers; they correspond in ascending order. Tables are the same, in any order.
    """
    then, now = known.holders, shard_map.holders
    if len(then) != len(now) or known.spec.variables != shard_map.spec.variables:
        return None
    numbers = dict(zip(then, now, strict=True))
    owners = {table.name: held for table, held in zip(known.spec.tables, known.tables, strict=True)}
    return replace(
        shard_map,
        slices=tuple(replace(piece, shard=numbers[piece.shard]) for piece in known.slices),
        tables=tuple(tuple(numbers[shard] for shard in owners[table.name]) for table in shard_map.spec.tables),
    )


def place(spec: ModelSpec, shards: int, rule: PartitionRule) -> tuple[Slice, ...]:
    """The slices of ``spec`` over ``shards`` shards, in arena order.

    Every row of every variable is in exactly one slice; a variable without rows has one empty slice. Under
    ``Balanced`` the largest shard holds at most 1.05 times the mean, as long as no row is above 0.05 times the mean.
    """
    placed = _balanced(spec, shards) if isinstance(rule, Balanced) else _cut_by_rule(spec, shards, rule)
    return in_arena_order(spec, placed)


def most_slices(spec: ModelSpec, shards: int, rule: PartitionRule) -> int:
    """An upper bound of the slices that ``place`` makes; no size in ``spec`` is negative."""
    if spec.unsplit:
        return len(spec.variables)
    if not isinstance(rule, Balanced):
        return sum(max(1, min(v.rows, _parts(rule, v.rows, v.row_bytes))) for v in spec.variables)
    total = sum(v.nbytes for v in spec.variables)
    # Each variable one; the cuts that fill a shard, or part rows above the slack; those at the size of slices.
    cuts = shards * (1 + 100 // (LIMIT_PERCENT - 100))
    # Such parts are smaller than the limit by less than one alignment unit.
    return len(spec.variables) + cuts + total // (_SLICE_BYTES - _SLICE_BYTES // 16)


def in_arena_order(spec: ModelSpec, slices: Iterable[Slice]) -> tuple[Slice, ...]:
    """Order slices by shard; within a shard whole variables first, in declared order, then parts of split ones, so that
    ranges merge.
    """

    def key(piece: Slice) -> tuple[int, bool, int, int]:
        split = piece.row_end - piece.row_begin < spec.variables[piece.variable].rows
        return piece.shard, split, piece.variable, piece.row_begin

    return tuple(sorted(slices, key=key))


class _Loads:
    """Bytes given to each shard so far."""

    def __init__(self, shards: int) -> None:
        self._heap = [(0, shard) for shard in range(shards)]

    def least(self) -> tuple[int, int]:
        """(bytes, number) of the least loaded shard; the lowest number among equals."""
        return self._heap[0]

    def add_to_least(self, nbytes: int) -> None:
        load, shard = self._heap[0]
        heapq.heapreplace(self._heap, (load + nbytes, shard))


def _balanced(spec: ModelSpec, shards: int) -> list[Slice]:
    """Place the largest variable first, on the least loaded shard; split a variable where the shard would exceed the
    mean.

    A cut fills a shard, so there are fewer cuts than shards (rows above the slack apart).
    """
    total = sum(v.nbytes for v in spec.variables)
    mean, limit = -(-total // shards), total * LIMIT_PERCENT // (100 * shards)
    loads = _Loads(shards)
    placed: list[Slice] = []
    # Largest rest first: (-bytes, variable, row at which the rest begins).
    rests = [(-v.nbytes, number, 0) for number, v in enumerate(spec.variables)]
    heapq.heapify(rests)
    while rests:
        negative, number, begin = heapq.heappop(rests)
        v = spec.variables[number]
        load, shard = loads.least()
        rows = v.rows - begin
        if load - negative > limit and rows > 1 and not spec.unsplit:
            rows = _rows_up_to(mean - load, limit - load, v.row_bytes, rows)
        placed.append(Slice(number, begin, begin + rows, shard))
        loads.add_to_least(rows * v.row_bytes)
        if begin + rows < v.rows:
            heapq.heappush(rests, (negative + rows * v.row_bytes, number, begin + rows))
    return [part for piece in _joined(placed) for part in _cut_to_size(piece, spec)]


def _rows_up_to(room_to_mean: int, room_to_limit: int, row_bytes: int, rows: int) -> int:
    """How many rows reach the mean; one fewer where the last would pass the limit; at least one, at most ``rows``."""
    fill = max(1, -(-room_to_mean // row_bytes))
    if fill * row_bytes > room_to_limit:
        fill = max(1, fill - 1)
    return min(fill, rows)


def _joined(placed: list[Slice]) -> list[Slice]:
    """Merge adjacent slices of one variable on one shard."""
    joined: list[Slice] = []
    for piece in sorted(placed, key=lambda s: (s.variable, s.row_begin, s.row_end)):
        last = joined[-1] if joined else None
        if last and (last.variable, last.shard, last.row_end) == (piece.variable, piece.shard, piece.row_begin):
            joined[-1] = Slice(last.variable, last.row_begin, piece.row_end, last.shard)
        else:
            joined.append(piece)
    return joined


def _cut_to_size(piece: Slice, spec: ModelSpec) -> Iterator[Slice]:
    """``piece``, or nearly equal parts of it on the same shard, none above the size limit of slices.

    All parts but the last are of whole alignment units where rows are small: neighbours in a region have no padding
    between them, so that a worker's gradient can be one tensor there.
    """
    rows, row_bytes = piece.row_end - piece.row_begin, spec.variables[piece.variable].row_bytes
    unit = _aligned_rows(row_bytes)
    units = -(-rows // unit)
    # In units, a part may be no larger than the whole units in the limit.
    limit = _SLICE_BYTES // (unit * row_bytes) * unit * row_bytes if unit > 1 else _SLICE_BYTES
    parts = 1 if spec.unsplit else max(1, min(units, -(-rows * row_bytes // limit)))
    borders = [piece.row_begin + min(rows, unit * (units * part // parts)) for part in range(parts + 1)]
    for begin, end in itertools.pairwise(borders):
        yield Slice(piece.variable, begin, end, piece.shard)


def _aligned_rows(row_bytes: int) -> int:
    """The fewest rows whose bytes are a multiple of the alignment; 1 where these are a large part of a slice."""
    rows = ALIGNMENT_BYTES // math.gcd(ALIGNMENT_BYTES, row_bytes or ALIGNMENT_BYTES)
    return rows if rows * row_bytes <= _SLICE_BYTES // 16 else 1


def _cut_by_rule(spec: ModelSpec, shards: int, rule: FixedShards | MinSize | MaxSize) -> list[Slice]:
    """Cut every variable into the rule's number of nearly equal slices, then place those largest first."""
    cuts: list[tuple[int, int, int, int]] = []
    for number, v in enumerate(spec.variables):
        parts = 1 if spec.unsplit else max(1, min(v.rows, _parts(rule, v.rows, v.row_bytes)))
        size, longer = divmod(v.rows, parts)
        begin = 0
        for part in range(parts):
            end = begin + size + (part < longer)
            cuts.append(((begin - end) * v.row_bytes, number, begin, end))
            begin = end
    loads = _Loads(shards)
    placed: list[Slice] = []
    for negative, number, begin, end in sorted(cuts):
        placed.append(Slice(number, begin, end, loads.least()[1]))
        loads.add_to_least(-negative)
    return placed


def _parts(rule: FixedShards | MinSize | MaxSize, rows: int, row_bytes: int) -> int:
    """Number of slices, as in tf.distribute.experimental.partitioners."""
    match rule:
        case FixedShards(slices):
            return slices
        case MinSize(min_slice_bytes, max_slices):
            return min(max_slices, math.ceil(rows * row_bytes / min_slice_bytes))
        case MaxSize(max_slice_bytes, max_slices):
            rows_per_slice = max(1, max_slice_bytes // max(1, row_bytes))
            parts = math.ceil(rows / rows_per_slice)
            return min(max_slices, parts) if max_slices else parts
