"""Reads the changes of one table on one shard: one Feed call after another, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from ps_protocol.errors import InternalError, PsError, Retryable, Unavailable, UnknownModel
from ps_protocol.model.tables import Ids
from ps_protocol.retry import SHARD, Attempts
from ps_protocol.rpc.client_errors import translate
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.chunks import FEED_REPLIES, ChunkReceiver

_FEED = "/ps_protocol.v1.Shard/Feed"

_AHEAD = 2
"""Batches that are read ahead."""


@dataclass(frozen=True, slots=True)
class FeedMessage:
    """A FeedBatch message with its payload."""

    message: pb.FeedBatch
    deleted: Ids
    ids: Ids
    #: float32 [ids, width]
    rows: npt.NDArray[np.float32]


#: What the thread reports: a batch, the end of a stream that does not follow, or the error it gave up with.
Event = FeedMessage | PsError | None


class ShardReader:
    """One shard's batches. Made by TableFeed; ``told`` and ``stop`` are called by its thread.

    A signal handler that raises inside gRPC may leave a lock held. Therefore a thread without signals reads the call,
    and the caller waits for a queue. A stream that breaks is opened again from the last cursor.
    """

    def __init__(
        self,
        shard: int,
        request: pb.FeedRequest,
        address: Callable[[int], str],
        patience_seconds: float,
        tell: Callable[[ShardReader, Event], None],
        say: Callable[[str], None],
        open_shard: Callable[[str], grpc.Channel],
    ) -> None:
        """``address`` gives the present address of a shard; empty: it is not known. ``open_shard``: a channel to one.

        The thread calls all four.
        """
        self.shard = shard
        self._request = request
        self._address = address
        self._patience_seconds = patience_seconds
        self._tell = tell
        self._say = say
        self._open = open_shard
        self._stopped = threading.Event()
        self._room = threading.Semaphore(_AHEAD)
        self._call: Any = None
        threading.Thread(target=self._run, name=f"ps-feed-{shard}", daemon=True).start()

    def taken(self) -> None:
        """Let the thread report one more event."""
        self._room.release()

    def stop(self) -> None:
        """End: report nothing more."""
        self._stopped.set()
        self._room.release()
        if (call := self._call) is not None:
            call.cancel()

    def _run(self) -> None:
        attempts: Attempts | None = None
        while not self._stopped.is_set():
            end: Event = None
            try:
                for batch in self._stream():
                    self._pass_on(batch)
                    attempts = None
            except (Retryable, UnknownModel) as error:
                # A restarted shard may not know its models yet.
                attempts = attempts or Attempts(SHARD.within(self._patience_seconds))
                pause = attempts.pause_after(error)
                if pause is not None and not self._stopped.is_set():
                    self._say(f"waiting for shard {self.shard}: {error.message}")
                    self._stopped.wait(pause)
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

    def _stream(self) -> Iterator[FeedMessage]:
        """One call, until it ends. Raises PsError."""
        if not (address := self._address(self.shard)):
            raise Unavailable(f"shard {self.shard} is not there", shard=str(self.shard))
        peer = f"shard {self.shard} at {address}"
        with self._open(address) as channel:
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


def _read(data: bytes, replies: Iterator[bytes], peer: str) -> FeedMessage:
    """The batch that ``data`` announces. Raises InternalError, InvalidRequest for other bytes."""
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
    pieces = [memoryview(array.reshape(-1).view(np.uint8).data) for array in (ids, rows)]
    ChunkReceiver(FEED_REPLIES, pieces, peer, InternalError).receive(lambda: next(replies, None))
    return FeedMessage(message, np.frombuffer(message.deleted, np.int64), ids, rows)
