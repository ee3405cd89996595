"""Reads what changes in one table on one shard: one Feed call after another, from a thread of its own."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from ps_protocol.client.coordinator import connect_channel
from ps_protocol.client.errors import translate
from ps_protocol.errors import InternalError, NotReady, PsError, Unavailable, UnknownModel
from ps_protocol.frames import STATE_CHUNK_FIELD, Scatter, parse_chunk
from ps_protocol.tables import Ids
from ps_protocol.v1 import shard_pb2 as pb

_FEED = "/ps_protocol.v1.Shard/Feed"
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 2.0

_AHEAD = 2
"""Batches that are read before they are asked for."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A message FeedBatch with what follows it."""

    message: pb.FeedBatch
    deleted: Ids
    ids: Ids
    #: float32 [ids, width]
    rows: npt.NDArray[np.float32]


#: What a reader has to tell: a batch, the end of a stream that does not follow, or why it gave up.
Event = Batch | PsError | None


class ShardReader:
    """One shard's batches. Made by TableFeed; ``told`` and ``stop`` are called by its thread.

    A thread of its own reads the call, for a signal handler that raises in gRPC's waiting may leave it locked; so
    signals reach only a thread that waits for a queue. A stream that breaks is begun again from the last cursor.
    """

    def __init__(
        self,
        shard: int,
        request: pb.FeedRequest,
        address: Callable[[int], str],
        patience_seconds: float,
        tell: Callable[[ShardReader, Event], None],
        say: Callable[[str], None],
    ) -> None:
        """``address`` tells where a shard is now, empty: nobody knows. The thread calls all three."""
        self.shard = shard
        self._request = request
        self._address = address
        self._patience_seconds = patience_seconds
        self._tell = tell
        self._say = say
        self._stopped = threading.Event()
        self._room = threading.Semaphore(_AHEAD)
        self._call: Any = None
        threading.Thread(target=self._run, name=f"ps-feed-{shard}", daemon=True).start()

    def taken(self) -> None:
        """One more event may come."""
        self._room.release()

    def stop(self) -> None:
        """Tell nothing any more."""
        self._stopped.set()
        self._room.release()
        if (call := self._call) is not None:
            call.cancel()

    def _run(self) -> None:
        pause, failing_since, progress = _FIRST_PAUSE_SECONDS, math.inf, 0
        while not self._stopped.is_set():
            end: Event = None
            try:
                for batch in self._stream():
                    self._pass_on(batch)
                    pause, failing_since = _FIRST_PAUSE_SECONDS, math.inf
            except (Unavailable, UnknownModel, NotReady) as error:
                # A shard that has just come back has not heard of its models yet, or has not placed them.
                if isinstance(error, NotReady) and error.progress > progress:
                    progress, failing_since = error.progress, math.inf
                failing_since = min(failing_since, time.monotonic())
                if time.monotonic() - failing_since < self._patience_seconds and not self._stopped.is_set():
                    self._say(f"waiting for shard {self.shard}: {error.message}")
                    self._stopped.wait(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                    continue
                end = error
            except PsError as error:
                end = error
            self._pass_on(end)
            return

    def _pass_on(self, event: Event) -> None:
        self._room.acquire()
        if not self._stopped.is_set():
            self._tell(self, event)

    def _stream(self) -> Iterator[Batch]:
        """One call, as far as it goes. Raises PsError."""
        if not (address := self._address(self.shard)):
            raise Unavailable(f"shard {self.shard} is not there", shard=str(self.shard))
        peer = f"shard {self.shard} at {address}"
        with connect_channel(address) as channel:
            feed: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(_FEED)
            self._call = replies = feed(self._request.SerializeToString())
            try:
                while not self._stopped.is_set() and (data := next(replies, None)) is not None:
                    batch = _read(data, replies, peer)
                    yield batch
                    self._request.ClearField("cursor")
                    if batch.message.HasField("cursor"):
                        self._request.cursor.CopyFrom(batch.message.cursor)
            except grpc.RpcError as error:
                raise translate(error, peer) from error
            finally:
                replies.cancel()
        if self._request.follow:
            raise Unavailable(f"{peer} ended the stream", shard=str(self.shard))


def _read(data: bytes, replies: Iterator[bytes], peer: str) -> Batch:
    """The batch that ``data`` announces. Raises InternalError, InvalidRequest for anything that is none."""
    try:
        reply = pb.FeedReply.FromString(data)
    except DecodeError:
        reply = pb.FeedReply()
    if reply.WhichOneof("body") != "batch":
        raise InternalError(f"{peer} sent something else where a batch of changes was due")
    message = reply.batch
    ids = np.empty(message.rows, np.int64)
    rows = np.empty((message.rows, message.width), np.float32)
    if ids.nbytes + rows.nbytes != message.payload_bytes or len(message.deleted) % ids.itemsize:
        raise InternalError(f"{peer} sent a batch of changes that does not fit together")
    scatter = Scatter([memoryview(array.reshape(-1).view(np.uint8).data) for array in (ids, rows)])
    while not scatter.complete:
        chunk = parse_chunk(STATE_CHUNK_FIELD, next(replies, b""))
        if chunk is None:
            raise InternalError(f"{peer} sent something else in the middle of a batch of changes")
        scatter.write(*chunk)
    return Batch(message, np.frombuffer(message.deleted, np.int64), ids, rows)
