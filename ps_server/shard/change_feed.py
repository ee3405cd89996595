"""Serves what changes in a table to those who follow it (the Feed call): read piece by piece beside the training."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Layout
from ps_protocol.model.tables import Ids
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.chunks import FEED_REPLIES
from ps_server.limits import FEEDS, PEER_FEEDS, SharedLimit, host_of
from ps_server.log.messages import bytes_of
from ps_server.shard.execution.executor import INLINE_WORK_BYTES, ShardExecutor
from ps_server.shard.registry import Registry
from ps_server.shard.step.model import ShardModel
from ps_server.shard.transport.grpc_stream import Context, write

if TYPE_CHECKING:
    from ps_server.tables.table import ShardTable


LANE_SHARE = 0.1
"""Of the executor's time, what one reader that has everything takes at most by looking for more."""


BATCH_ROWS = 20_000
"""Rows of one batch: copied within a few milliseconds."""

BATCH_BUCKETS = 1000
"""Buckets of one batch, however few rows they hold."""

DELETED_IDS = 50_000
"""Deletions of one batch."""

SCAN_ROWS = 1 << 19
"""Rows whose last use is looked at in one step: about a millisecond."""

ROUND_ROWS = 5 * BATCH_ROWS
"""Rows that a round sends at most; where its updates have more, it ends with an earlier update."""

_NO_IDS: Ids = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class FeedPosition:
    """How far a reader is: it has rows used up to an update, and deletions and arrivals up to a change.

    What was deleted after that change and is there again was used after that update, or its bucket arrived after that
    change: both are read in one step.
    """

    updates: int
    changes: int


@dataclass(frozen=True, slots=True)
class ChangeBatch:
    """One batch, all of one moment. Its reader empties ``buckets``, drops ``deleted``, writes ``rows``."""

    #: Where a reader of everything up to this batch is; None: it starts over.
    reached: FeedPosition | None
    buckets: Sequence[int] = ()
    deleted: Ids = field(default_factory=lambda: _NO_IDS)
    ids: Ids = field(default_factory=lambda: _NO_IDS)
    #: float32 [ids, width]
    rows: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))
    #: It is the last one of what there was when the round began.
    current: bool = False

    @property
    def empty(self) -> bool:
        """Whether it changes nothing."""
        return not (len(self.buckets) or self.deleted.size or self.ids.size)


def round_of(
    table: ShardTable, since: FeedPosition | None, buckets: Sequence[int], width: int
) -> Iterator[ChangeBatch | None]:
    """The changes between ``since`` (None: the beginning) and the table's state at the first step, in batches.

    Each step is a few milliseconds of work in the executor; the table may change between steps. A step without a
    batch yields None. The last one yields a batch, which may be empty. ``buckets``: those of this shard; ``width``: how
    many numbers of a row are sent.
    """
    goal = FeedPosition(table.updates, table.changes)
    deleted = table.deletions_since(since.changes) if since is not None and _may_be(since, goal) else None
    if since is None or deleted is None:
        yield from _whole(table, buckets, None, width)
        yield ChangeBatch(goal, current=True)
        return
    here = np.zeros(table.spec.buckets, np.bool_)
    here[list(buckets)] = True
    arrived = here & (table.arrived > since.changes)
    # Of a bucket that has left another shard may have sent changes already.
    deleted = deleted[_of(deleted, here)]
    # First: what has gone may be there again.
    for begin in range(0, deleted.size, DELETED_IDS):
        yield ChangeBatch(since, deleted=deleted[begin : begin + DELETED_IDS])
    yield from _whole(table, [int(bucket) for bucket in np.flatnonzero(arrived)], since, width)
    yield from _used(table, FeedPosition(since.updates, goal.changes), goal, arrived, width)


def _may_be(reached: FeedPosition, goal: FeedPosition) -> bool:
    return reached.updates <= goal.updates and reached.changes <= goal.changes


def _whole(
    table: ShardTable, buckets: Sequence[int], reached: FeedPosition | None, width: int
) -> Iterator[ChangeBatch]:
    """Everything of ``buckets``, small ones together."""
    group: list[int] = []
    ids = list[Ids]()
    for number, bucket in enumerate(buckets):
        group.append(bucket)
        ids.append(table.ids_of(bucket))
        if sum(map(len, ids)) < BATCH_ROWS and len(group) < BATCH_BUCKETS and number + 1 < len(buckets):
            continue
        together = np.concatenate(ids)
        for begin in range(0, max(1, together.size), BATCH_ROWS):
            yield _rows(table, together[begin : begin + BATCH_ROWS], reached, width, buckets=() if begin else group)
        group, ids = [], []


def _used(
    table: ShardTable, reached: FeedPosition, goal: FeedPosition, arrived: npt.NDArray[np.bool_], width: int
) -> Iterator[ChangeBatch | None]:
    """Rows used after ``reached`` up to ``goal``, in the order of their last use, but those of ``arrived`` buckets.

    A batch ends with an update where one ends in it; the reader has reached an update when it has all of it.
    """
    through, ids, touched = yield from _find(table, reached.updates, goal.updates, arrived)
    begin = 0
    while begin < ids.size:
        end = min(begin + BATCH_ROWS, ids.size)
        if end < ids.size and (cut := int(np.searchsorted(touched, touched[end]))) > begin:
            end = cut
        last = end == ids.size
        if not last and touched[end] != touched[end - 1]:
            reached = FeedPosition(int(touched[end - 1]), goal.changes)
        elif last:
            reached = FeedPosition(through, goal.changes)
        yield _rows(table, ids[begin:end], reached, width, current=last and through == goal.updates)
        begin = end
    if not ids.size:
        yield ChangeBatch(FeedPosition(through, goal.changes), current=True)


def _find(
    table: ShardTable, after: int, through: int, arrived: npt.NDArray[np.bool_]
) -> Generator[None, None, tuple[int, Ids, npt.NDArray[np.int64]]]:
    """Ids used after update ``after`` and their last uses, rising, up to the first of the tuple: at most ``through``.

    From the last row to the first: what goes meanwhile moves rows towards the end of the search, never out of it.
    """
    ids, touched, most = _NO_IDS, _NO_IDS, ROUND_ROWS
    for begin in range((table.rows - 1) // SCAN_ROWS * SCAN_ROWS, -1, -SCAN_ROWS):
        new_ids, new_touched = table.last_uses(table.changed(begin, begin + SCAN_ROWS, after))
        wanted = (new_touched <= through) & ~_of(new_ids, arrived)
        ids, touched = np.concatenate((ids, new_ids[wanted])), np.concatenate((touched, new_touched[wanted]))
        if ids.size > most:
            through = int(np.partition(touched, ROUND_ROWS // 2)[ROUND_ROWS // 2])
            ids, touched = ids[touched <= through], touched[touched <= through]
            most = max(ROUND_ROWS, 2 * ids.size)
        yield None
    order = np.argsort(touched, kind="stable")
    return through, ids[order], touched[order]


def _of(ids: Ids, buckets: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Whether each id is of one of the buckets marked."""
    from ps_protocol.model.ids import buckets_of  # Compiled code: not for those who only import this module.

    marked: npt.NDArray[np.bool_] = buckets[buckets_of(ids, buckets.size)]
    return marked


def _rows(
    table: ShardTable,
    ids: Ids,
    reached: FeedPosition | None,
    width: int,
    *,
    buckets: Sequence[int] = (),
    current: bool = False,
) -> ChangeBatch:
    """The rows as they are now; a later round has those that were deleted meanwhile."""
    found = table.copy_ids(ids)
    rows = np.ascontiguousarray(found.rows[:, :width])
    return ChangeBatch(reached, buckets, ids=found.ids, rows=rows, current=current)


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
        lineage = self._lineage(table)
        width = table.spec.width if request.with_state else table.spec.dim
        cursor = request.cursor
        since = FeedPosition(cursor.updates, cursor.changes) if cursor.lineage == lineage else None
        send = partial(_send, context, lineage, self._registry.incarnation, width)
        reader = _Reader(model, request.table, width, self._registry.context.executor, send)
        self._readers.add(reader)
        try:
            await reader.run(since, follow=request.follow)
        finally:
            self._readers.discard(reader)

    async def positions(self, model: ShardModel) -> list[tuple[str, pb.FeedCursor]]:
        """The name of each table of ``model``, and where a reader stands that has all of it as it is now."""
        if not model.tables:
            return []

        def read(tables: Sequence[ShardTable]) -> list[tuple[int, int]]:
            return [(table.updates, table.changes) for table in tables]

        return [
            (
                table.spec.name,
                pb.FeedCursor(
                    lineage=self._lineage(table),
                    updates=updates,
                    changes=changes,
                    incarnation=self._registry.incarnation,
                ),
            )
            for table, (updates, changes) in zip(model.tables, await model.rows.read(read), strict=True)
        ]

    def _lineage(self, table: ShardTable) -> str:
        return self._lineages.setdefault(table, self._name())

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
        self._since: FeedPosition | None = None
        #: What the round under way has taken.
        self._lane_seconds = 0.0
        #: Whether the reader had everything with the last batch.
        self._told = False

    async def run(self, since: FeedPosition | None, *, follow: bool) -> None:
        """Send everything, and continue with ``follow``. Raises what stops the model."""
        self._since = since
        while True:
            if not await self._round():
                continue
            if not follow:
                return
            await self._pause()
            while self._since == FeedPosition(self._table.updates, self._table.changes):
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


async def _send(context: Context, lineage: str, incarnation: int, width: int, batch: ChangeBatch) -> None:
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
        message.cursor.CopyFrom(
            pb.FeedCursor(lineage=lineage, updates=reached.updates, changes=reached.changes, incarnation=incarnation)
        )
    await write(context, pb.FeedReply(batch=message).SerializeToString())
    for chunk in FEED_REPLIES.chunks(pieces):
        await write(context, chunk)
