"""Everything that tables hold, as bytes, so that two of them can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ps_server.shard.step.model import ShardModel
from ps_server.state.blocks import buckets_of
from ps_server.tables.bucket_contents import BucketContents
from ps_server.tables.table import ShardTable
from tests.support.shards import TestShard

Bits = Mapping[tuple[int, int], bytes]
"""By number of a table and number of a bucket."""


def bits_of(tables: Sequence[ShardTable], buckets: Sequence[Sequence[int]]) -> Bits:
    """Of tables that nobody changes meanwhile, by the buckets of each."""
    return _bits((n, table.contents(bucket)) for n, table in enumerate(tables) for bucket in buckets[n])


def served_bits(shard: TestShard, model: ShardModel) -> Bits:
    """Of tables that a shard serves."""

    async def copies() -> list[tuple[int, BucketContents]]:
        wanted, found = buckets_of(model.layout), []
        while group := (await model.copy_buckets(wanted))[1]:
            found += group
        return found

    return _bits(shard.loop.run(copies()))


def _bits(contents: Iterable[tuple[int, BucketContents]]) -> Bits:
    return {
        (table, each.bucket): repr(each.header(table)).encode() + b"".join(each.pieces()) for table, each in contents
    }
