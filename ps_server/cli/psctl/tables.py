"""Asks the shards of a running job about its tables, for psctl status."""

from __future__ import annotations

from collections.abc import Iterable

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.model_status import ModelStatus
from ps_protocol.cluster.view import ClusterView
from ps_protocol.model.spec import ShardMap
from ps_server.cli.psctl.model_status import shard_maps, statuses_of
from ps_server.cli.status.text import TableTotals


def table_totals(client: CoordinatorClient, view: ClusterView, timeout_seconds: float) -> tuple[TableTotals, ...]:
    """Every table of the job, by model. Raises what the coordinator's client raises.

    Blocks; all shards are asked at once, and none in a job without tables.
    """
    maps = shard_maps(client, view, timeout_seconds)
    told = statuses_of(client, [shard_map for shard_map in maps if shard_map.tables], view)
    return tuple(
        _total(shard_map, number, told.get(shard_map.spec.name, []))
        for shard_map in maps
        for number in range(len(shard_map.tables))
    )


def _total(shard_map: ShardMap, number: int, told: Iterable[ModelStatus]) -> TableTotals:
    table = shard_map.spec.tables[number].name
    parts = [status for each in told for status in each.tables if status.name == table]
    return TableTotals(
        shard_map.spec.name,
        table,
        rows=sum(part.rows for part in parts),
        waiting=sum(part.waiting for part in parts),
        size_bytes=sum(part.size_bytes for part in parts),
        # Each shard counts every update, also those without rows there.
        updates=max((part.updates for part in parts), default=0),
        inserted=sum(part.inserted for part in parts),
        expired=sum(part.expired for part in parts),
        evicted=sum(part.evicted for part in parts),
        shards=len(shard_map.holders),
        answered=len(parts),
    )
