"""What a shard tells the coordinator of itself and its models with each heartbeat."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ps_protocol.cluster.held import TableCounts
from ps_protocol.cluster.view import MemberStats
from ps_server.shard.counters import Counters
from ps_server.shard.registry import Registry
from ps_server.shard.step.model import ShardModel


def shard_stats(counters: Counters, registry: Registry) -> MemberStats:
    """The numbers of this moment. Called by the heartbeat thread, while the event loop and the executor change them:
    each is one word.
    """
    versions, models = registry.versions, registry.models
    return replace(
        counters.stats([model.times for model in models]),
        version=max(versions.values(), default=0),
        versions=versions,
        activity=registry.activity,
        streams=_streams(models),
        held_bytes=sum(model.layout.region_bytes for model in models),
        tables=tuple(counts for model in models for counts in _tables(model)),
    )


def _streams(models: list[ShardModel]) -> dict[str, int]:
    found = Counter(transport.value for model in models for transport in list(model.streams.transports.values()))
    return dict(sorted(found.items()))


def _tables(model: ShardModel) -> list[TableCounts]:
    return [
        TableCounts(
            model=model.name,
            table=table.spec.name,
            rows=table.rows,
            waiting=table.waiting,
            size_bytes=table.size_bytes,
            inserted=table.inserted,
            expired=table.expired,
            evicted=table.evicted,
        )
        for table in model.tables
    ]
