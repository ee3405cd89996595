"""Asks the shards of a running job about its tables, for psctl status."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, suppress

import grpc

from ps_protocol.channel import CLIENT_OPTIONS
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.errors import UnknownModel
from ps_protocol.model import ShardMap
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.v1.shard_pb2_grpc import ShardStub
from ps_protocol.view import ClusterView, Role
from ps_server.launcher.status_text import TableTotals

ASK_SECONDS = 1.0
"""How long shards may take to answer; those that do not are left out, and that is shown."""


def table_totals(client: CoordinatorClient, view: ClusterView, timeout_seconds: float) -> tuple[TableTotals, ...]:
    """Every table of the job, by model. Raises what the coordinator's client raises.

    Blocks; shards are asked all at once, and none in a job without tables.
    """
    maps = []
    for model in sorted(view.models):
        with suppress(UnknownModel):  # of a coordinator that was started anew
            maps.append(client.get_shard_map(model, timeout_seconds))
    told = _ask([shard_map for shard_map in maps if shard_map.tables], view)
    return tuple(
        _total(shard_map, number, told.get(shard_map.spec.name, []))
        for shard_map in maps
        for number in range(len(shard_map.tables))
    )


def _ask(maps: Iterable[ShardMap], view: ClusterView) -> dict[str, list[pb.ModelStatus]]:
    """By model, what those of its shards told that answered in time."""
    members = view.live(Role.SHARD)
    told: dict[str, list[pb.ModelStatus]] = {}
    with ExitStack() as channels:
        stubs = {}
        for number in sorted(members.keys() & {number for shard_map in maps for number in shard_map.holders}):
            channel = channels.enter_context(grpc.insecure_channel(members[number].address, CLIENT_OPTIONS))
            stubs[number] = ShardStub(channel)  # type: ignore[no-untyped-call]
        calls = [
            (name, stubs[number].GetModel.future(pb.GetModelRequest(model=name), timeout=ASK_SECONDS))
            for name, holders in ((shard_map.spec.name, shard_map.holders) for shard_map in maps)
            for number in holders
            if number in stubs
        ]
        for name, call in calls:
            with suppress(grpc.RpcError):
                told.setdefault(name, []).append(call.result())
    return told


def _total(shard_map: ShardMap, number: int, told: Iterable[pb.ModelStatus]) -> TableTotals:
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
