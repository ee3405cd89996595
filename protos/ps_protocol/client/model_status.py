"""Asks the shards of a running job about its models: positions, sizes of tables, learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass

import grpc

from ps_protocol import times
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.model_status import ModelStatus
from ps_protocol.cluster.view import ClusterView, Role
from ps_protocol.errors import UnknownModel
from ps_protocol.model.spec import ShardMap
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.v1.shard_pb2_grpc import ShardStub
from ps_protocol.wire.convert.shard import model_status_from_pb


@dataclass(frozen=True, slots=True)
class TableTotals:
    """A table of one model, summed over the shards that answered."""

    model: str
    table: str
    rows: int
    #: Ids that have been used and have no row yet.
    waiting: int
    size_bytes: int
    #: Not a sum: each shard counts every update.
    updates: int
    #: Since the start of each shard.
    inserted: int
    expired: int
    evicted: int
    #: The number of shards that hold a part of the model, and of those that answered.
    shards: int
    answered: int

    def __str__(self) -> str:
        part = "" if self.answered == self.shards else f" ({self.answered} of {self.shards} shards)"
        return f"table {self.table}{part}"


@dataclass(frozen=True, slots=True)
class ModelRates:
    """The learning rates of one model; None where no step has sent one."""

    model: str
    #: Updates that the furthest shard has applied.
    version: int
    #: One for each parameter group; empty before the first step since its shards began.
    groups: tuple[float | None, ...]
    #: By name of the table.
    tables: Mapping[str, float | None]


def shard_maps(client: CoordinatorClient, view: ClusterView) -> list[ShardMap]:
    """Return the shard maps of all models, by name. Raises what the coordinator's client raises."""
    maps = []
    for model in sorted(view.models):
        with suppress(UnknownModel):  # of a coordinator that was restarted without a journal
            maps.append(client.get_shard_map(model))
    return maps


def statuses_of(client: CoordinatorClient, maps: Iterable[ShardMap], view: ClusterView) -> dict[str, list[ModelStatus]]:
    """Ask all shards at once; return, by model, the answers that came in time."""
    members, maps = view.live(Role.SHARD), list(maps)
    answers: dict[str, list[ModelStatus]] = {}
    with ExitStack() as channels:
        stubs = {}
        for number in sorted(members.keys() & {number for shard_map in maps for number in shard_map.holders}):
            channel = channels.enter_context(closing(client.open_shard(members[number].address)))
            stubs[number] = ShardStub(channel)  # type: ignore[no-untyped-call]
        calls = [
            # Shards that do not answer by then are left out, and the caller says so.
            (name, stubs[number].GetModel.future(pb.GetModelRequest(model=name), timeout=times.STATUS_CALL_SECONDS))
            for name, holders in ((shard_map.spec.name, shard_map.holders) for shard_map in maps)
            for number in holders
            if number in stubs
        ]
        for name, call in calls:
            with suppress(grpc.RpcError):
                answers.setdefault(name, []).append(model_status_from_pb(call.result()))
    return answers


def table_totals(client: CoordinatorClient, view: ClusterView) -> tuple[TableTotals, ...]:
    """Return every table of the job, by model. Asks no shard of a model without tables.

    Raises what the coordinator's client raises.
    """
    maps = shard_maps(client, view)
    answers = statuses_of(client, [shard_map for shard_map in maps if shard_map.tables], view)
    return tuple(
        _total(shard_map, number, answers.get(shard_map.spec.name, []))
        for shard_map in maps
        for number in range(len(shard_map.tables))
    )


def _total(shard_map: ShardMap, number: int, answers: Iterable[ModelStatus]) -> TableTotals:
    table = shard_map.spec.tables[number].name
    parts = [status for each in answers for status in each.tables if status.name == table]
    return TableTotals(
        shard_map.spec.name,
        table,
        rows=sum(part.rows for part in parts),
        waiting=sum(part.waiting for part in parts),
        size_bytes=sum(part.size_bytes for part in parts),
        updates=max((part.updates for part in parts), default=0),
        inserted=sum(part.inserted for part in parts),
        expired=sum(part.expired for part in parts),
        evicted=sum(part.evicted for part in parts),
        shards=len(shard_map.holders),
        answered=len(parts),
    )


def learning_rates_of(model: str, statuses: Sequence[ModelStatus]) -> ModelRates:
    """Return the rates of the shard that is furthest; rows of a table may be pushed to some of the shards only."""
    newest = max(statuses, key=lambda status: (bool(status.learning_rates), status.version))
    tables: dict[str, float | None] = {table.name: None for status in statuses for table in status.tables}
    for status in sorted(statuses, key=lambda status: status.version):
        tables |= {t.name: _known(t.learning_rate) for t in status.tables if t.learning_rate is not None}
    return ModelRates(model, newest.version, tuple(map(_known, newest.learning_rates)), tables)


def _known(rate: float) -> float | None:
    return None if math.isnan(rate) else rate
