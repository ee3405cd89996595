"""One model's values on one shard, read and written by calls beside the step stream."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence

from ps_protocol.cluster.answers import StepAnswer
from ps_protocol.cluster.model_status import ModelStatus
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import ShardMap
from ps_protocol.wire.frames import pieces_of
from ps_worker.memory.flat import FlatModel
from ps_worker.model.optimizer_state import StateEntry
from ps_worker.session.session import Session
from ps_worker.step.shard_calls import ShardClient, Writer
from ps_worker.tables.row_payloads import RowsCall
from ps_worker.transport.base import Peer


class ShardValues:
    """Used by the thread that uses the shard's stream. Each method may be repeated and raises PsError."""

    def __init__(self, session: Session, shard_map: ShardMap, shard: int, flat: FlatModel) -> None:
        self._session = session
        self._shard_map = shard_map
        self._shard = shard
        self._flat = flat
        self._layout: Layout = flat.plan.layouts[shard]

    def initialised(self) -> bool:
        """Whether the shard holds values of the model."""
        return self._calls().status().initialised

    def status(self) -> ModelStatus:
        """The state of the model on the shard."""
        return self._calls().status()

    def pull(self, place: Callable[[StepAnswer], Sequence[memoryview]]) -> int:
        """Receive the newest parameters and buffers into ``place``; returns their version."""
        return self._calls().pull(place, self._layout.region_bytes)

    def load_region(self, state: Sequence[StateEntry] = ()) -> None:
        """Upload parameters and buffers from flat memory, and optimizer state; the first values of a model win."""
        pieces = self._flat.pieces(self._flat.plan.ranges(self._shard))
        self._calls().load_region(self._writer(), pieces, state)

    def load_rows(self, call: RowsCall) -> None:
        """Upload first values of rows."""
        self._calls().load_rows(self._writer(), call.table, call.rows, call.pieces)

    def load_state(self, entries: list[StateEntry]) -> None:
        """Replace the optimizer state of the shard."""
        self._calls().load_state(self._writer(), entries)

    def save_state(self, variable: int | None = None) -> list[StateEntry]:
        """The optimizer state of the shard, or its part of that of one variable."""
        slices = [] if variable is None else self._slices_of(frozenset([variable]))
        if variable is not None and not slices:
            return []
        return self._calls().save(self._layout.region_bytes, slices)

    def holds(self, variables: Iterable[int]) -> bool:
        """Whether the shard has slices of any of ``variables``, by number."""
        return bool(self._slices_of(frozenset(variables)))

    def assign(self, variables: frozenset[int], *, checksums: bool) -> None:
        """Write flat memory's values of ``variables``, by number, over the shard's.

        ``checksums``: the shard keeps checksums of the values for workers that ask later, after more training.
        """
        if slices := self._slices_of(variables):
            pieces = self._flat.pieces(self._flat.plan.values(self._shard, slices))
            sums = [self._checksum(index) for index in slices] if checksums else []
            self._calls().assign(self._writer(), slices, pieces, sums)

    def not_assigned(self, variables: frozenset[int]) -> list[int]:
        """Those of ``variables`` that were not assigned flat memory's values on the shard."""
        told = self.status().assigned_checksums
        return [
            self._layout.slices[index].slice.variable
            for index in self._slices_of(variables)
            if told.get(index) != self._checksum(index)
        ]

    def first_difference(self, variables: frozenset[int]) -> int | None:
        """The first of ``variables`` whose values on the shard are not flat memory's; None: all are equal."""
        region = memoryview(bytearray(self._layout.region_bytes))
        self.pull(
            lambda result: pieces_of(region, self._layout.ranges(result.absent, buffers=result.with_buffers)),
        )
        for index in self._slices_of(variables):
            span, (own,) = self._layout.slices[index], self._flat.plan.values(self._shard, [index]) or [(0, 0)]
            if region[span.begin : span.end] != b"".join(self._flat.pieces([own])):
                return span.slice.variable
        return None

    def _checksum(self, index: int) -> int:
        checksum = 0
        for piece in self._flat.pieces(self._flat.plan.values(self._shard, [index])):
            checksum = zlib.crc32(piece, checksum)
        return checksum

    def _slices_of(self, variables: frozenset[int]) -> list[int]:
        return [i for i, span in enumerate(self._layout.slices) if span.slice.variable in variables]

    def _writer(self) -> Writer:
        return Writer(self._session.rank, self._session.incarnation, self._session.revision)

    def _calls(self) -> ShardClient:
        session, shard = self._session, self._shard
        peer = Peer(shard, session.shard_address(shard))
        return ShardClient(session.shard_channel(shard), peer, self._shard_map.spec.name, self._shard_map.epoch)
