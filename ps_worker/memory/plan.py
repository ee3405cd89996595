"""The positions of a model's variables in the worker's flat memory, and the bytes there of each shard's region."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby, pairwise

from ps_protocol.model.layout import ArenaKey, Layout, Range, SliceSpan, aligned, arena_keys, merge
from ps_protocol.model.spec import ALIGNMENT_BYTES, Kind, ShardMap
from ps_protocol.wire.codecs import PayloadRun, payload_runs

_CACHED_PATTERNS = 64


class FlatPlan:
    """Immutable; computed once per model from its shard map.

    Flat memory holds one arena per arena key of the model. In each arena come the whole variables of shard 0 in the
    order of its region, then those of shard 1, and so on, then the variables that are split over shards. Every variable
    begins at a multiple of 64 bytes, and so does every slice in its region, with padding between them on both sides.
    A shard's region is therefore a few ranges of flat memory, even with many variables. Padding behind a slice that is
    a part of its variable cannot be between the variable's rows: it goes to 64 bytes of its own at the end. When
    slices move between shards, variables keep their positions in flat memory.
    """

    def __init__(self, shard_map: ShardMap, before: FlatPlan | None = None) -> None:
        """``before``: the plan of the shard map before this one, in which slices have moved."""
        self.variables = shard_map.spec.variables
        self.layouts = tuple(Layout.of(shard_map, shard) for shard in range(shard_map.shards))
        #: Byte position of each variable in flat memory.
        self.offsets: list[int] = [0] * len(self.variables)
        #: The bytes of each arena in flat memory.
        self.arenas: list[tuple[ArenaKey, Range]] = []
        #: Bytes of all arenas.
        self.values_bytes = 0
        if before is None:
            for key in arena_keys(shard_map.spec):
                self._place(key)
        else:
            self.offsets, self.arenas, self.values_bytes = before.offsets, before.arenas, before.values_bytes
        self.total_bytes = self.values_bytes + ALIGNMENT_BYTES
        #: For each variable that is one run of bytes in one shard's region: the shard, and the run.
        self.unparted: dict[int, tuple[int, Range]] = {}
        for layout in self.layouts:
            self._find_unparted(layout)
        self._slices = [[self._places(span) for span in layout.slices] for layout in self.layouts]
        # A model's steps show few patterns of absent variables, mostly one: the frozen and unused ones.
        #: See ``_ranges`` and ``_contents``.
        self.ranges = lru_cache(_CACHED_PATTERNS)(self._ranges)
        self.contents = lru_cache(_CACHED_PATTERNS)(self._contents)

    @property
    def holders(self) -> tuple[int, ...]:
        """The shards that have any part of the model."""
        return tuple(shard for shard, layout in enumerate(self.layouts) if layout.holds_any)

    def values(self, shard: int, slices: Iterable[int]) -> list[Range]:
        """The ranges in flat memory of some slices of ``shard``, by index, without padding."""
        found = []
        for index in slices:
            span, (begin, _) = self.layouts[shard].slices[index], self._slices[shard][index][0]
            found.append((begin, begin + span.end - span.begin))
        return merge(found)

    def _place(self, key: ArenaKey) -> None:
        begin = position = self.values_bytes
        members = [i for i, v in enumerate(self.variables) if ArenaKey(v.kind, v.group, v.dtype) == key]
        whole = [
            span.slice.variable
            for layout in self.layouts
            for span in layout.slices
            if layout.arenas[span.arena].key == key
            and (span.slice.row_begin, span.slice.row_end) == (0, span.variable.rows)
        ]
        placed = set(whole)
        for number in (*whole, *(i for i in members if i not in placed)):
            self.offsets[number] = position
            position = aligned(position + self.variables[number].nbytes)
        self.arenas.append((key, (begin, position)))
        self.values_bytes = position

    def _find_unparted(self, layout: Layout) -> None:
        for number, spans in groupby(layout.slices, lambda span: span.slice.variable):
            parts = list(spans)
            first, last = parts[0], parts[-1]
            meet = all(
                (one.end, one.slice.row_end) == (other.begin, other.slice.row_begin) for one, other in pairwise(parts)
            )
            if meet and (first.slice.row_begin, last.slice.row_end) == (0, first.variable.rows):
                self.unparted[number] = layout.shard, (first.begin, last.end)

    def _places(self, span: SliceSpan) -> tuple[Range, ...]:
        """The ranges in flat memory of a slice and its padding, in the order of the region."""
        variable = self.offsets[span.slice.variable]
        begin = variable + span.slice.row_begin * span.variable.row_bytes
        end = begin + span.end - span.begin
        padding_bytes = span.padded_end - span.end
        if span.end - span.begin == span.variable.nbytes:
            return ((begin, end + padding_bytes),)
        return (begin, end), (self.values_bytes, self.values_bytes + padding_bytes)

    def _ranges(self, shard: int, absent: tuple[int, ...] = (), buffers: bool = True) -> list[Range]:
        """The ranges in flat memory of a payload of ``shard``, in payload order.

        Without the slices ``absent``, by index; without buffers unless ``buffers``.
        """
        missing = frozenset(absent)
        spans = zip(self.layouts[shard].slices, self._slices[shard], strict=True)
        return merge(
            place
            for index, (span, places) in enumerate(spans)
            if index not in missing and (buffers or span.variable.kind is Kind.PARAMETER)
            for place in places
        )

    def _contents(
        self, shard: int, absent: tuple[int, ...], buffers: bool
    ) -> tuple[tuple[int, ...], list[Range], tuple[PayloadRun, ...]]:
        """The payload of a push to ``shard`` without the variables ``absent``, by number.

        Indexes of the slices that are left out; ranges of the shard's region; the same bytes as runs of one dtype.
        """
        layout, missing = self.layouts[shard], frozenset(absent)
        slices = tuple(i for i, span in enumerate(layout.slices) if span.slice.variable in missing)
        return slices, layout.ranges(slices, buffers=buffers), payload_runs(layout, slices, buffers=buffers)
