"""Assigns the buckets of tables to shards: evenly, with few moves, deterministically."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ps_protocol.model.spec import ShardMap
from ps_protocol.model.tables import TableSpec


@dataclass(frozen=True, slots=True)
class BucketPlace:
    """Bucket ``number`` of table number ``table``, on shard ``shard``."""

    table: int
    number: int
    shard: int


def shares(
    tables: Sequence[TableSpec], shards: Sequence[int], owners: Sequence[Sequence[int]] = ()
) -> list[dict[int, int]]:
    """For each table, the number of buckets that each of ``shards`` should have.

    It balances counts, not bytes: a hash distributes ids over buckets, so all buckets have about the same size and
    load. The counts of one table differ by one at most, and so do the sums over all tables. ``owners``: the current
    shard of each bucket of each table; a shard with one bucket more keeps it if the result is as even. The result is
    stable.
    """
    extras: Counter[int] = Counter()
    wanted = []
    for table, held in zip(tables, map(Counter, owners or [()] * len(tables)), strict=True):
        each, rest = divmod(table.buckets, len(shards))
        favoured = set(sorted(shards, key=lambda shard: (extras[shard], held[shard] <= each, shard))[:rest])
        extras.update(favoured)
        wanted.append({shard: each + (shard in favoured) for shard in shards})
    return wanted


def place_tables(tables: Sequence[TableSpec], shards: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """For each table, the initial shard of each bucket, as in ShardMap.

    Each shard gets one run of buckets, in order, so that a different number of shards reads a checkpoint in few long
    pieces.
    """
    return tuple(
        tuple(shard for shard, count in share.items() for _ in range(count)) for share in shares(tables, shards)
    )


def bucket_moves(shard_map: ShardMap, shards: Sequence[int], balance: bool) -> Iterator[tuple[BucketPlace, int]]:
    """The buckets that have to move, and their targets among ``shards``: those on other shards, and with ``balance``
    any surplus.

    Each bucket goes to the shard that lacks most of its share of that table. Empty once all have moved.
    """
    wanted = shares(shard_map.spec.tables, shards, shard_map.tables)
    for table, share in enumerate(wanted):
        held: dict[int, list[BucketPlace]] = {shard: [] for shard in (*share, *shard_map.tables[table])}
        for number, owner in enumerate(shard_map.tables[table]):
            held[owner].append(BucketPlace(table, number, owner))
        leaving = [bucket for shard, buckets in held.items() if shard not in share for bucket in buckets]
        lacking = {shard: count - len(held[shard]) for shard, count in share.items()}
        if balance:
            leaving += [bucket for shard, count in share.items() for bucket in held[shard][count:]]
            lacking = {shard: max(0, count) for shard, count in lacking.items()}
        for bucket in leaving:
            to = max(shards, key=lambda shard: (lacking[shard], -shard))
            lacking[to] -= 1
            yield bucket, to
