"""Reads a table of a running job: the changes of all its shards in one stream, through restarts and moves.

A copy that applies them in order equals the rows of the shards.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ps_protocol import times
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.client.coordinator_streams import ViewStream
from ps_protocol.cluster.view import ClusterView, Role
from ps_protocol.errors import InvalidRequest, ModelMoved, PsError, Unavailable, UnknownModel
from ps_protocol.feed.cursor import Cursor, Cursors, load_cursor, save_cursor
from ps_protocol.feed.stream import Event, FeedMessage, ShardReader
from ps_protocol.interruptible import next_item
from ps_protocol.model.spec import ShardMap
from ps_protocol.model.tables import Ids, TableSpec
from ps_protocol.v1 import shard_pb2 as pb

__all__ = ["Change", "Cursor", "Following", "TableFeed", "load_cursor", "save_cursor"]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a table on one shard.

    To apply it to a copy: remove the rows of ``reset_buckets`` and of ``deleted``, then write ``rows``.
    """

    shard: int
    table: TableSpec
    #: Buckets that come from the beginning: a copy drops the rows of their ids first.
    reset_buckets: tuple[int, ...]
    #: int64; some may be unknown to the reader.
    deleted: Ids
    #: int64, each once.
    ids: Ids
    #: float32 [ids, dim], or [ids, width] with the optimizer's state.
    rows: npt.NDArray[np.float32]
    #: With this change a copy has everything that each shard had at the last request.
    whole: bool
    #: The position after this change.
    cursor: Cursor


@dataclass(frozen=True, slots=True)
class Following:
    """The table to read, and the options."""

    table: str
    model: str = "model"
    #: Rows have their optimizer's state.
    with_state: bool = False
    #: Continue as rows change, until the job is finished; else end once all present rows have come.
    follow: bool = True
    #: How long to wait for shards and a coordinator that do not answer.
    patience_seconds: float = 60.0


class TableFeed:
    """Iterated once, by one thread, which a signal may interrupt at any moment; no member of the job.

    A change that a reader of the cursor has seen before may come again; none is left out.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        what: Following,
        cursor: Cursor | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``say`` is called with what the reader waits for, from any thread. Raises InvalidRequest."""
        self._client = client
        self._what = what
        self._cursors = Cursors.of(cursor, what.model, what.table)
        self._say_to = say
        self._said = -times.HINT_SECONDS
        self._view = ClusterView()
        self._events: queue.SimpleQueue[ClusterView | tuple[ShardReader, Event]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._views: ViewStream | None = None

    def __iter__(self) -> Iterator[Change]:
        """Raises UnknownModel, InvalidRequest for an unknown table, Unavailable for shards that do not answer."""
        status = self._client.get_status(self._what.patience_seconds)
        self._view = status.view
        if self._cursors.job_id != status.job_id:
            # What a reader has of another job goes, shard by shard.
            self._cursors.keep(())
            self._cursors.job_id = status.job_id
        threading.Thread(target=self._watch, name="ps-feed-views", daemon=True).start()
        try:
            shard_map: ShardMap | None = self._declared()
            while shard_map is not None:
                shard_map = yield from self._epoch(shard_map)
        finally:
            self._closed.set()
            if (views := self._views) is not None:
                views.cancel()

    def _watch(self) -> None:
        """In a thread of its own: receives every new view, also after the coordinator was restarted."""
        while not self._closed.is_set():
            # ValueError: from a call on a channel that another thread closes.
            with suppress(PsError, ValueError):
                self._views = self._client.watch()
                for view in self._views:
                    self._events.put(view)
                    if self._closed.is_set():
                        return
            self._closed.wait(times.REWATCH_SECONDS)

    def _declared(self) -> ShardMap:
        name = self._what.model
        while True:
            try:
                return self._client.get_shard_map(name, self._what.patience_seconds)
            except UnknownModel:
                if not self._what.follow or self._view.finished:
                    raise
            self._say(f"waiting for a worker to declare model '{name}'")
            event = next_item(self._events)
            if isinstance(event, ClusterView):
                self._view = event

    def _epoch(self, shard_map: ShardMap) -> Generator[Change, None, ShardMap | None]:
        """All changes until slices or buckets move, or the job ends. Returns the next shard map; None: the end."""
        number = self._number(shard_map)
        finished = self._view.finished
        holders = sorted(set(shard_map.tables[number]))
        self._cursors.keep(holders)
        self._cursors.epoch = shard_map.epoch
        readers = {shard: self._reader(shard, shard_map, number, last=finished) for shard in holders}
        current = dict.fromkeys(holders, False)
        try:
            left = set(holders)
            while left:
                event = next_item(self._events)
                if isinstance(event, ClusterView):
                    self._view = event
                    if self._moved(shard_map) or (event.finished and not finished and self._what.follow):
                        return self._newest(shard_map)
                    continue
                reader, told = event
                if readers.get(reader.shard) is not reader:
                    continue
                reader.taken()
                if told is None:
                    left.discard(reader.shard)
                elif isinstance(told, ModelMoved):
                    return self._newer(shard_map)
                elif isinstance(told, PsError):
                    raise told
                else:
                    current[reader.shard] = told.message.current
                    yield self._change(reader.shard, shard_map.spec.tables[number], told, all(current.values()))
            return None
        finally:
            for reader in readers.values():
                reader.stop()

    def _change(self, shard: int, table: TableSpec, batch: FeedMessage, whole: bool) -> Change:
        message = batch.message
        self._cursors.set(shard, message.cursor if message.HasField("cursor") else None)
        cursor = self._cursors.to_json()
        return Change(shard, table, tuple(message.buckets), batch.deleted, batch.ids, batch.rows, whole, cursor)

    def _reader(self, shard: int, shard_map: ShardMap, number: int, *, last: bool) -> ShardReader:
        what = self._what
        request = pb.FeedRequest(
            model=what.model,
            table=number,
            cursor=self._cursors.get(shard),
            follow=what.follow and not last,
            with_state=what.with_state,
            epoch=shard_map.epoch,
        )
        patience = min(what.patience_seconds, times.END_SECONDS) if last else what.patience_seconds
        open_shard = self._client.open_shard
        return ShardReader(shard, request, self._address, patience, self._hear, self._say, open_shard)

    def _hear(self, reader: ShardReader, event: Event) -> None:
        self._events.put((reader, event))

    def _address(self, shard: int) -> str:
        member = self._view.live(Role.SHARD).get(shard)
        return member.address if member else ""

    def _number(self, shard_map: ShardMap) -> int:
        names = [table.name for table in shard_map.spec.tables]
        if self._what.table not in names:
            raise InvalidRequest(
                f"model '{self._what.model}' has no table '{self._what.table}'",
                variable=self._what.table,
                expected=", ".join(names) or "a model with tables",
            )
        return names.index(self._what.table)

    def _moved(self, shard_map: ShardMap) -> bool:
        return self._view.models.get(self._what.model, 0) > shard_map.epoch

    def _newest(self, shard_map: ShardMap) -> ShardMap:
        """Raises Unavailable, unless the job is finished and the present shard map is the last."""
        try:
            return self._client.get_shard_map(self._what.model, self._what.patience_seconds)
        except Unavailable:
            if not self._view.finished:
                raise
            return shard_map

    def _newer(self, shard_map: ShardMap) -> ShardMap:
        """A shard knows of a newer shard map. Raises Unavailable when the coordinator does not."""
        deadline = time.monotonic() + self._what.patience_seconds
        while (found := self._newest(shard_map)).epoch <= shard_map.epoch:
            self._say(f"waiting for the shard map that model '{self._what.model}' moved to")
            if time.monotonic() >= deadline:
                raise Unavailable(
                    f"the shards hold model '{self._what.model}' by a newer shard map than the coordinator has",
                    expected=f"an epoch above {shard_map.epoch}",
                    remedy="see whether the coordinator was started without its journal",
                )
            self._closed.wait(times.REWATCH_SECONDS / 5)
        return found

    def _say(self, text: str) -> None:
        now = time.monotonic()
        if now - self._said >= times.HINT_SECONDS:
            self._said = now
            self._say_to(text)
