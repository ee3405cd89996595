"""Decides which row buckets are copied at one time: small ones together, and never much at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ps_protocol.model.layout import Layout
from ps_server.tables.bucket_contents import BucketContents

if TYPE_CHECKING:
    from ps_server.tables.table import ShardTable

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


def copy_group(tables: Sequence[ShardTable], wanted: Wanted) -> Group:
    """In the executor: the next buckets of ``wanted`` as they are now; none: there are no more."""
    group, size = list[tuple[int, BucketContents]](), 0
    for table, bucket in wanted:
        contents = tables[table].contents(bucket)
        group.append((table, contents))
        size += max(contents.nbytes, _LEAST_BYTES)
        if size >= GROUP_BYTES:
            break
    return group
