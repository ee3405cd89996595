"""Asks shards for the sizes of their tables, from which a move estimates the bytes of a bucket."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

from ps_protocol import times
from ps_protocol.cluster.view import ClusterView, Member, Role
from ps_protocol.errors import PsError
from ps_protocol.model.spec import ShardMap
from ps_protocol.rpc.channel import OpenChannel, open_async_channel
from ps_server.coordinator.jobs.shard_control import ShardControl

#: By names of model and table.
TableKey = tuple[str, str]


async def bucket_bytes(
    view: ClusterView, maps: Mapping[str, ShardMap], open_channel: OpenChannel = open_async_channel
) -> dict[TableKey, int]:
    """About how many bytes one bucket of each table takes; ids are spread evenly over a table's buckets.

    Runs on the coordinator's loop. A shard that does not answer in time is left out, and so is a table of which no
    shard reports a size.
    """
    with_tables = {name: shard_map for name, shard_map in maps.items() if shard_map.tables}
    members = view.live(Role.SHARD)
    holders = {number for shard_map in with_tables.values() for number in shard_map.holders}
    numbers = sorted(holders & members.keys())
    told = await asyncio.gather(*(_table_bytes(members[number], with_tables, open_channel) for number in numbers))
    nbytes: Counter[TableKey] = Counter()
    buckets: Counter[TableKey] = Counter()
    for number, sizes in zip(numbers, told, strict=True):
        for model, shard_map in with_tables.items():
            for table, owners in zip(shard_map.spec.tables, shard_map.tables, strict=True):
                if (key := (model, table.name)) in sizes:
                    nbytes[key] += sizes[key]
                    buckets[key] += owners.count(number)
    return {key: nbytes[key] // count for key, count in buckets.items() if count}


async def _table_bytes(member: Member, maps: Mapping[str, ShardMap], open_channel: OpenChannel) -> dict[TableKey, int]:
    """What one shard tells of the tables it holds buckets of."""
    sizes: dict[TableKey, int] = {}
    shard = ShardControl(member, open_channel=open_channel)
    try:
        with suppress(PsError):
            for model in [name for name, shard_map in maps.items() if member.index in shard_map.holders]:
                status = await shard.model_status(model, times.BRIEF_CALL_SECONDS)
                sizes |= {(model, table.name): table.size_bytes for table in status.tables}
    finally:
        await shard.close()
    return sizes
