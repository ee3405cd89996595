"""Decides what of a model is copied at one time: blocks of its region, and groups of row buckets.

Torch never steps two blocks as one parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import Kind
from ps_server.tables.bucket_contents import BucketChanges, BucketContents

if TYPE_CHECKING:
    from ps_server.tables.saves import TableSave
    from ps_server.tables.table import ShardTable

T = TypeVar("T", BucketContents, BucketContents | BucketChanges)

BLOCK_BYTES = 32 << 20
"""A block is no larger, unless it is one slice that is: placement cuts slices to this size where it may."""


@dataclass(frozen=True, slots=True)
class Block:
    """Slices [first, last) of a layout, neighbours in one arena; all buffers together are one block.

    A copy of one block with its optimizer state continues bit for bit on its own: torch's kernels see the same
    segments whether or not other blocks are stepped at the same time.
    """

    first: int
    last: int
    begin: int
    end: int

    @property
    def slices(self) -> frozenset[int]:
        """Indexes of its slices."""
        return frozenset(range(self.first, self.last))


def blocks_of(layout: Layout) -> tuple[Block, ...]:
    """The blocks of ``layout`` in order; every slice is in exactly one, buffers in the last."""
    blocks: list[Block] = []
    arena = None
    for index, span in enumerate(layout.slices[: layout.parameter_slices]):
        last = blocks[-1] if blocks else None
        if last and span.arena == arena and span.end - last.begin <= BLOCK_BYTES:
            blocks[-1] = Block(last.first, index + 1, last.begin, span.end)
        else:
            blocks.append(Block(index, index + 1, span.begin, span.end))
        arena = span.arena
    if layout.parameter_slices < len(layout.slices):
        begin = min(span.begin for span in layout.arenas if span.key.kind is Kind.BUFFER)
        blocks.append(Block(layout.parameter_slices, len(layout.slices), begin, layout.region_bytes))
    return tuple(blocks)


def block_numbers(layout: Layout) -> tuple[int, ...]:
    """For each slice, the number of its block."""
    return tuple(number for number, block in enumerate(blocks_of(layout)) for _ in range(block.first, block.last))


GROUP_BYTES = 1 << 20
"""After so much no bucket is added to a group: updates wait while it is copied."""

_LEAST_BYTES = 16 << 10
"""What a bucket counts at least: that many bytes are copied in the time that an empty one takes."""

Wanted = Iterator[tuple[int, int]]
"""Buckets still to be copied: number of a table, number of a bucket."""

Group = Sequence[tuple[int, BucketContents]]
"""Copies of some buckets, all of one moment, by number of their table."""


def buckets_of(layout: Layout) -> Wanted:
    """Every row bucket of the model on the shard."""
    return ((table, bucket) for table, here in enumerate(layout.buckets) for bucket in here)


Saved = Sequence[tuple[int, BucketContents | BucketChanges]]
"""The same, of buckets of which a snapshot has an earlier copy."""


def save_group(saves: Sequence[TableSave], wanted: Wanted) -> Saved:
    """As ``copy_group``: what has changed of the next buckets since an earlier snapshot."""
    return _group((table, saves[table].copy(bucket)) for table, bucket in wanted)


def copy_group(tables: Sequence[ShardTable], wanted: Wanted) -> Group:
    """In the executor: the next buckets of ``wanted`` as they are now; none: there are no more."""
    return _group((table, tables[table].contents(bucket)) for table, bucket in wanted)


def _group(copies: Iterator[tuple[int, T]]) -> list[tuple[int, T]]:
    group, size = list[tuple[int, T]](), 0
    for table, contents in copies:
        group.append((table, contents))
        size += max(contents.nbytes, _LEAST_BYTES)
        if size >= GROUP_BYTES:
            break
    return group
