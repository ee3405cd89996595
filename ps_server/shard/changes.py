"""Serves what changes in a table to those who follow it (the Feed call): read piece by piece beside the training."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ps_protocol.errors import InvalidRequest
from ps_protocol.frames import STATE_CHUNK_FIELD, cut, encode_chunk
from ps_protocol.layout import Layout
from ps_protocol.v1 import shard_pb2 as pb
from ps_server.log import bytes_of
from ps_server.shard.carriers.grpc_stream import Context, write
from ps_server.shard.change_round import Batch, Reached, round_of
from ps_server.shard.lane import INLINE_BYTES, Lane
from ps_server.shard.model import ShardModel
from ps_server.shard.registry import Registry

if TYPE_CHECKING:
    from ps_server.tables import Table

PAUSE_SECONDS = 0.1
"""Between two rounds of a reader that has everything, at least."""

LANE_SHARE = 0.1
"""Of the lane's time, what one reader that has everything takes at most by looking for more."""


class ChangeFeed:
    """Called by ShardService on the shard's event loop; any number of readers at once.

    A lineage is one Table object in memory: it goes through moves of buckets, and ends with the process. After a
    restart a reader is given everything anew, for the numbers of deletions and arrivals are not kept on disk.
    """

    def __init__(self, registry: Registry, name: Callable[[], str] = lambda: secrets.token_hex(8)) -> None:
        """``name`` makes names of lineages, no two alike."""
        self._registry = registry
        self._name = name
        self._lineages: WeakKeyDictionary[Table, str] = WeakKeyDictionary()

    async def serve(self, request: pb.FeedRequest, context: Context) -> None:
        """One reader's stream. Raises UnknownModel, InvalidRequest, ModelMoved once slices or buckets have moved."""
        model = await self._registry.model(request.model, request.epoch)
        _check_table(model.layout, request.table)
        table = model.tables[request.table]
        lineage = self._lineages.setdefault(table, self._name())
        width = table.spec.width if request.with_state else table.spec.dim
        cursor = request.cursor
        since = Reached(cursor.updates, cursor.changes) if cursor.lineage == lineage else None
        send = partial(_send, context, lineage, width)
        await _Reader(model, request.table, width, self._registry.parts.lane, send).run(since, follow=request.follow)


class _Reader:
    """One reader's way through a table. Used by one call of ``serve``."""

    def __init__(
        self, model: ShardModel, table: int, width: int, lane: Lane, send: Callable[[Batch], Awaitable[None]]
    ) -> None:
        self._model = model
        self._table = model.tables[table]
        self._buckets = model.layout.buckets[table]
        self._width = width
        self._lane = lane
        self._send = send
        self._since: Reached | None = None
        #: What the round under way has taken.
        self._lane_seconds = 0.0
        #: Whether the last batch said that the reader has everything.
        self._told = False

    async def run(self, since: Reached | None, *, follow: bool) -> None:
        """Tell everything, and go on with ``follow``. Raises what stops the model."""
        self._since = since
        while True:
            if not await self._round():
                continue
            if not follow:
                return
            await self._pause()
            while self._since == Reached(self._table.updates, self._table.changes):
                await self._pause()

    async def _pause(self) -> None:
        await asyncio.sleep(max(PAUSE_SECONDS, self._lane_seconds / LANE_SHARE))
        self._model.check()

    async def _round(self) -> bool:
        """Whether that was everything there was when it began."""
        steps = round_of(self._table, self._since, self._buckets, self._width)
        self._lane_seconds, last = 0.0, _END

        def step() -> Batch | None:
            begin = time.perf_counter()
            try:
                return next(steps, _END)
            finally:
                self._lane_seconds += time.perf_counter() - begin

        while True:
            self._model.check()
            batch = await self._lane.submit(step, INLINE_BYTES)
            # What was read after the model moved on is not this epoch's.
            self._model.check()
            if batch is _END:
                return last.current
            if batch is not None:
                self._since, last = batch.reached, batch
                if not batch.empty or (batch.current and not self._told):
                    await self._send(batch)
                    self._told = batch.current


_END = Batch(None)


def _check_table(layout: Layout, number: int) -> None:
    known = len(layout.shard_map.spec.tables)
    if number >= known:
        raise InvalidRequest(
            "a table does not exist", shard=str(layout.shard), expected=f"a number below {known}", actual=str(number)
        )


async def _send(context: Context, lineage: str, width: int, batch: Batch) -> None:
    pieces = [bytes_of(batch.ids), bytes_of(batch.rows)]
    message = pb.FeedBatch(
        buckets=batch.buckets,
        deleted=batch.deleted.tobytes(),
        rows=batch.ids.size,
        width=width,
        payload_bytes=sum(map(len, pieces)),
        current=batch.current,
    )
    if reached := batch.reached:
        message.cursor.CopyFrom(pb.FeedCursor(lineage=lineage, updates=reached.updates, changes=reached.changes))
    await write(context, pb.FeedReply(batch=message).SerializeToString())
    for position, chunk in cut(pieces):
        await write(context, encode_chunk(STATE_CHUNK_FIELD, position, chunk))
