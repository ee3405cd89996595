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
from ps_protocol.model.layout import Layout
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.chunks import FEED_REPLIES
from ps_server.limits import FEEDS, PEER_FEEDS, SharedLimit, host_of
from ps_server.log.row_messages import bytes_of
from ps_server.shard.execution.executor import INLINE_WORK_BYTES, ShardExecutor
from ps_server.shard.registry import Registry
from ps_server.shard.step.model import ShardModel
from ps_server.shard.tables.change_round import ChangeBatch, Reached, round_of
from ps_server.shard.transport.grpc_stream import Context, write

if TYPE_CHECKING:
    from ps_server.tables.table import ShardTable


LANE_SHARE = 0.1
"""Of the executor's time, what one reader that has everything takes at most by looking for more."""


class ChangeFeed:
    """Called by ShardService on the shard's event loop; any number of readers at once.

    A lineage is one Table object in memory: it goes through moves of buckets, and ends with the process. After a
    restart a reader is given everything again, for the numbers of deletions and arrivals are not kept on disk.
    """

    def __init__(self, registry: Registry, name: Callable[[], str] = lambda: secrets.token_hex(8)) -> None:
        """``name`` makes names of lineages, no two alike."""
        self._registry = registry
        self._name = name
        self._lineages: WeakKeyDictionary[ShardTable, str] = WeakKeyDictionary()
        self._readers: set[_Reader] = set()
        limits, counts = registry.context.limits, registry.context.limit_counts
        self._limit = SharedLimit(limits.max_feeds, limits.max_peer_feeds, (FEEDS, PEER_FEEDS), counts)

    async def serve(self, request: pb.FeedRequest, context: Context) -> None:
        """One reader's stream. Raises UnknownModel, InvalidRequest, ModelMoved once slices or buckets have moved;
        Unavailable when there are too many readers, or this one does not read.
        """
        peer = host_of(context.peer())
        self._limit.take(peer, "readers of changes", ("--max-feeds", "--max-peer-feeds"))
        try:
            await self._serve(request, context)
        finally:
            self._limit.give_back(peer)

    async def _serve(self, request: pb.FeedRequest, context: Context) -> None:
        model = await self._registry.model(request.model, request.epoch)
        _check_table(model.layout, request.table)
        table = model.tables[request.table]
        lineage = self._lineages.setdefault(table, self._name())
        width = table.spec.width if request.with_state else table.spec.dim
        cursor = request.cursor
        since = Reached(cursor.updates, cursor.changes) if cursor.lineage == lineage else None
        send = partial(_send, context, lineage, width)
        reader = _Reader(model, request.table, width, self._registry.context.executor, send)
        self._readers.add(reader)
        try:
            await reader.run(since, follow=request.follow)
        finally:
            self._readers.discard(reader)

    @property
    def lags(self) -> list[tuple[str, str, int]]:
        """For each reader: model, table, and the updates of the table that it has not got."""
        return [reader.lag for reader in self._readers]


class _Reader:
    """One reader's way through a table. Used by one call of ``serve``."""

    def __init__(
        self,
        model: ShardModel,
        table: int,
        width: int,
        executor: ShardExecutor,
        send: Callable[[ChangeBatch], Awaitable[None]],
    ) -> None:
        self._model = model
        self._table = model.tables[table]
        self._buckets = model.layout.buckets[table]
        self._width = width
        self._executor = executor
        self._send = send
        self._since: Reached | None = None
        #: What the round under way has taken.
        self._lane_seconds = 0.0
        #: Whether the last batch said that the reader has everything.
        self._told = False

    async def run(self, since: Reached | None, *, follow: bool) -> None:
        """Send everything, and continue with ``follow``. Raises what stops the model."""
        self._since = since
        while True:
            if not await self._round():
                continue
            if not follow:
                return
            await self._pause()
            while self._since == Reached(self._table.updates, self._table.changes):
                await self._pause()

    @property
    def lag(self) -> tuple[str, str, int]:
        """Model, table, and the updates of the table that this reader has not got."""
        got = self._since.updates if self._since else 0
        return self._model.name, self._table.spec.name, max(0, self._table.updates - got)

    async def _pause(self) -> None:
        await asyncio.sleep(max(0.1, self._lane_seconds / LANE_SHARE))
        self._model.gate.check()

    async def _round(self) -> bool:
        """Whether that was everything there was when it began."""
        steps = round_of(self._table, self._since, self._buckets, self._width)
        self._lane_seconds, last = 0.0, _END

        def step() -> ChangeBatch | None:
            begin = time.perf_counter()
            try:
                return next(steps, _END)
            finally:
                self._lane_seconds += time.perf_counter() - begin

        while True:
            self._model.gate.check()
            batch = await self._executor.submit(step, INLINE_WORK_BYTES)
            # What was read after the model moved on is not this epoch's.
            self._model.gate.check()
            if batch is _END:
                return last.current
            if batch is not None:
                last = batch
                if not batch.empty or (batch.current and not self._told):
                    await self._send(batch)
                    self._told = batch.current
                # Only now: a reader that does not read has not got it.
                self._since = batch.reached


_END = ChangeBatch(None)


def _check_table(layout: Layout, number: int) -> None:
    known = len(layout.shard_map.spec.tables)
    if number >= known:
        raise InvalidRequest(
            "a table does not exist", shard=str(layout.shard), expected=f"a number below {known}", actual=str(number)
        )


async def _send(context: Context, lineage: str, width: int, batch: ChangeBatch) -> None:
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
    for chunk in FEED_REPLIES.chunks(pieces):
        await write(context, chunk)
