"""Reads the newest parameters of a model that workers train, and checks that it is the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch

from ps_protocol import times
from ps_protocol.cluster.answers import StepAnswer
from ps_protocol.cluster.view import ClusterView
from ps_protocol.errors import ModelMismatch, ModelMoved, Retryable, UnknownModel
from ps_protocol.model.spec import Kind, ShardMap, Variable
from ps_protocol.retry import SHARD, Attempts
from ps_worker.memory.flat import FlatModel
from ps_worker.model.bindings import Bindings, Source, bind, read_groups
from ps_worker.model.plain import plain_module
from ps_worker.session.session import Session
from ps_worker.step.pipeline import newer_map
from ps_worker.step.shard_calls import ShardClient
from ps_worker.tables.binding import TableBinding
from ps_worker.tables.lookup import Lookup, Position, ShardLookup
from ps_worker.tables.row_payloads import RowRouter
from ps_worker.tables.table import NO_TABLES, DeclaredTables, declared, matched, table_differences
from ps_worker.transport.base import Peer

T = TypeVar("T")


def follow(session: Session, source: Source, name: str, min_interval_seconds: float) -> Iterator[int]:
    """Yield the step each time newer parameters of model ``name`` are in ``source``; end with the job.

    The step is the number of updates that every shard has applied. Raises UnknownModel when the job ends without such a
    model, ModelMismatch when ``source`` is another one, Unavailable when shards stay away, Fenced.
    """
    follower = Evaluator(session, source, _declared(session, name))
    seen: tuple[int, ...] | None = None
    while True:
        session.check()
        # Read before the versions, so that the last updates are not missed.
        finished = session.view.finished
        versions = follower.versions()
        if versions is None:
            session.wait_hint(f"waiting for the initial values of model '{name}'")
        elif versions != seen:
            seen = follower.pull()
            session.instruments.version = min(seen)
            yield min(seen)
        if finished:
            return
        session.wait_for(lambda view: view.finished, min_interval_seconds)


def _declared(session: Session, name: str) -> ShardMap:
    def settled(view: ClusterView) -> bool:
        return name in view.models or view.finished

    while not session.wait_for(settled, 1.0):
        known = ", ".join(session.view.models) or "none"
        session.wait_hint(f"waiting for a worker to declare model '{name}' (so far: {known})")
    if name not in session.view.models:
        raise UnknownModel(
            f"the job ended without a model named '{name}'",
            expected=", ".join(session.view.models) or "a model",
            remedy="give follow() the name that cluster.optimizer(…, name=…) was given",
        )
    return session.shard_map(name)


class Evaluator:
    """Reads one model from all shards into the script's own. Used from the script's thread."""

    def __init__(self, session: Session, source: Source, shard_map: ShardMap) -> None:
        source = plain_module(source) if isinstance(source, torch.nn.Module) else source
        module = source if isinstance(source, torch.nn.Module) else None
        own = declared(module.modules() if module else (), lambda: session.seed)
        groups = read_groups(source, may_be_empty=bool(own.specs))
        self._flat = FlatModel(match(shard_map, bind(groups, module), own), shard_map)
        self._session = session
        self._shard_map = shard_map
        self._router = RowRouter(shard_map)
        TableBinding(matched(own, shard_map.spec.tables), lambda: self, trains=False).bind()

    def versions(self) -> tuple[int, ...] | None:
        """Return the version on every shard; None while one has no values yet. Raises Unavailable."""
        status = self._of_all(lambda shard: self._persist(shard, ShardClient.status))
        return tuple(s.version for s in status) if all(s.initialised for s in status) else None

    def pull(self) -> tuple[int, ...]:
        """Take parameters and buffers from every shard, and return their versions. Raises Unavailable."""
        versions = self._of_all(self._pull)
        self._flat.publish_parameters()
        self._flat.publish_buffers()
        return versions

    # -- RowSource of the model's tables

    @property
    def next_position(self) -> Position:
        """Always the same: an evaluator makes no push."""
        return 0, 1

    def look_up(self, lookup: Lookup) -> None:
        """Does nothing: ``finish`` requests all rows."""

    def finish(self, lookup: Lookup) -> None:
        """Fill ``lookup`` with the newest rows of every shard. Raises Unavailable."""
        while not lookup.arrived:
            lookup.lay_out(self._router)
            try:
                for shard, part in lookup.parts.items():
                    self._persist(shard, partial(read_rows, part=part))
            except ModelMoved as moved:
                self._lay_out(moved)
        lookup.finish()

    def _of_all(self, read: Callable[[int], T]) -> tuple[T, ...]:
        """``read`` on every shard that has a part; again on all of them when slices have moved meanwhile."""
        while True:
            try:
                return tuple(map(read, self._flat.plan.holders))
            except ModelMoved as moved:
                self._lay_out(moved)

    def _lay_out(self, moved: ModelMoved) -> None:
        seconds = self._session.config.reconnect_timeout_seconds
        self._shard_map = newer_map(self._session, self._shard_map, moved, seconds)
        self._router = RowRouter(self._shard_map)
        self._flat.lay_out(self._shard_map)

    def _pull(self, shard: int) -> int:
        plan, memory = self._flat.plan, self._flat.parameters

        def place(result: StepAnswer) -> list[memoryview]:
            return memory.pieces(plan.ranges(shard, result.absent, result.with_buffers))

        return self._persist(shard, lambda calls: calls.pull(place, plan.layouts[shard].region_bytes))

    def _persist(self, shard: int, call: Callable[[ShardClient], T]) -> T:
        """``call``, repeated while the shard is away, up to the reconnect timeout."""
        session = self._session
        attempts = Attempts(SHARD.within(session.config.reconnect_timeout_seconds))
        last = Attempts(SHARD.within(times.END_SECONDS))
        while True:
            peer = Peer(shard, session.shard_address(shard))
            spec = self._shard_map.spec
            try:
                return call(ShardClient(session.shard_channel(shard), peer, spec.name, self._shard_map.epoch))
            except Retryable as error:
                session.check()
                if session.epoch(spec.name) > self._shard_map.epoch:
                    raise ModelMoved(f"slices of model '{spec.name}' have moved") from error
                session.wait_hint(f"waiting: {error.message}")
                (last if session.view.finished else attempts).sleep_after(error)


def match(shard_map: ShardMap, own: Bindings, tables: DeclaredTables = NO_TABLES) -> Bindings:
    """Return the script's tensors in the order of the declared model. Raises ModelMismatch with every difference."""
    declared = shard_map.spec.variables
    # A binding lists its parameters before its buffers.
    count = len(own.parameters)
    parameters = {v.name: p for v, p in zip(own.variables[:count], own.parameters, strict=True)}
    buffers = {v.name: b for v, b in zip(own.variables[count:], own.buffers, strict=True)}
    mine = {v.name: v for v in own.variables}
    kinds = {v.kind for v in declared} - {Kind.BUFFER}
    differences = [d for v in declared if (d := _difference(v, mine.get(v.name)))]
    names = {v.name for v in declared}
    # Buffers that each worker keeps for itself are no difference.
    extra = [v for v in own.variables if v.name not in names and v.kind in kinds]
    differences += [f"'{v.name}' is not in the declared model" for v in extra]
    differences += table_differences(shard_map.spec.tables, tables.specs)
    if differences:
        raise ModelMismatch(
            f"this model is not the declared model '{shard_map.spec.name}': " + "; ".join(differences),
            remedy="build the same model as the workers",
        )
    return Bindings(
        declared,
        tuple(parameters[v.name] for v in declared if v.kind is Kind.PARAMETER),
        tuple(buffers[v.name] for v in declared if v.kind is Kind.BUFFER),
    )


def _difference(declared: Variable, own: Variable | None) -> str:
    if own is None:
        return f"'{declared.name}' is missing here"
    parts = [
        f"{what} {mine} instead of {theirs}"
        for what, theirs, mine in (
            ("shape", declared.shape, own.shape),
            ("dtype", declared.dtype.value, own.dtype.value),
            ("kind", declared.kind.value, own.kind.value),
        )
        if theirs != mine
    ]
    return f"'{declared.name}' has " + ", ".join(parts) if parts else ""


_CALL_IDS = 300_000


def read_rows(calls: ShardClient, part: ShardLookup) -> None:
    """Fill ``part`` with the newest rows of one shard, in calls that fit into a message. Raises PsError."""
    pieces = iter(zip(part.ids, part.pieces, strict=True))
    for table in part.tables:
        left = table.rows
        while left:
            ids, rows = next(pieces)
            count = len(ids) // 8
            row_bytes = len(rows) // count
            for begin in range(0, count, _CALL_IDS):
                end = min(count, begin + _CALL_IDS)
                calls.get_rows(table.table, [ids[8 * begin : 8 * end]], [rows[row_bytes * begin : row_bytes * end]])
            left -= count
    part.arrived = True
