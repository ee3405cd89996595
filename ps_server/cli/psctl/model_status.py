"""Asks the shards of a running job for the status of its models."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, suppress

import grpc

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.model_status import ModelStatus
from ps_protocol.cluster.view import ClusterView, Role
from ps_protocol.errors import UnknownModel
from ps_protocol.model.spec import ShardMap
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.v1.shard_pb2_grpc import ShardStub
from ps_protocol.wire.convert.status import model_status_from_pb

ASK_SECONDS = 1.0
"""How long shards may take to answer; those that do not are left out, and the output says so."""


def shard_maps(client: CoordinatorClient, view: ClusterView, timeout_seconds: float) -> list[ShardMap]:
    """Those of all models, by name. Raises what the coordinator's client raises."""
    maps = []
    for model in sorted(view.models):
        with suppress(UnknownModel):  # of a coordinator that was restarted without a journal
            maps.append(client.get_shard_map(model, timeout_seconds))
    return maps


def statuses_of(client: CoordinatorClient, maps: Iterable[ShardMap], view: ClusterView) -> dict[str, list[ModelStatus]]:
    """By model, the answers of its shards that came in time."""
    members = view.live(Role.SHARD)
    told: dict[str, list[ModelStatus]] = {}
    with ExitStack() as channels:
        stubs = {}
        for number in sorted(members.keys() & {number for shard_map in maps for number in shard_map.holders}):
            channel = channels.enter_context(client.open_shard(members[number].address))
            stubs[number] = ShardStub(channel)  # type: ignore[no-untyped-call]
        calls = [
            (name, stubs[number].GetModel.future(pb.GetModelRequest(model=name), timeout=ASK_SECONDS))
            for name, holders in ((shard_map.spec.name, shard_map.holders) for shard_map in maps)
            for number in holders
            if number in stubs
        ]
        for name, call in calls:
            with suppress(grpc.RpcError):
                told.setdefault(name, []).append(model_status_from_pb(call.result()))
    return told
