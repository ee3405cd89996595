"""The gRPC transport: all messages on the long-lived Step stream. Works everywhere, and anchors the side channels."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any

import grpc

from ps_protocol import times
from ps_protocol.cluster.answers import Answer, OpenedStream, WaitingAnswer
from ps_protocol.cluster.requests import (
    ArriveRequest,
    FetchRequest,
    LookupHeader,
    OpenRequest,
    PushHeader,
    StageRequest,
    StepRequest,
)
from ps_protocol.cluster.transport import Transport
from ps_protocol.errors import InternalError, PsError
from ps_protocol.model.layout import Range
from ps_protocol.wire.chunks import STEP_REQUESTS
from ps_protocol.wire.convert.step import request_to_pieces
from ps_protocol.wire.frames import CHUNK_BYTES
from ps_worker.transport.base import GrpcReplies, Link, Place, read_answer, rpc_errors, typed
from ps_worker.transport.call_messages import CallMessages

_METHOD = "/ps_protocol.v1.Shard/Step"

_LARGEST_MAPPED_BYTES = (32 << 20) - (64 << 10)
"""glibc never maps more for one block of its own accord than 32 MB, with what is around the block."""


@cache
def keep_freed_memory() -> None:
    """Let the heap keep up to 64 MB that are freed, for the chunks of the next step; done once in a process.

    gRPC allocates and frees several copies of each chunk. By default glibc maps such blocks or gives the free end of
    the heap back, and the pages of each chunk are faulted in again: 20,000 in a step of 100 MB. It raises both
    thresholds by itself when a program frees a mapped block as large as this one, which is never touched. Where a user
    has set the thresholds, and where the allocator is not glibc's, nothing changes.
    """
    bytes(_LARGEST_MAPPED_BYTES)


class GrpcClientTransport:
    """Used by the training thread; gRPC's own thread takes requests from the outbox and encodes them there.

    Sending never waits. At most one encoded chunk is in memory: gRPC asks for the next when the last is on its way.
    When the call ends, for whatever reason, the outbox is closed, so gRPC's thread ends too. Receiving can be
    interrupted by Ctrl-C.
    """

    transport = Transport.GRPC
    gradients = ()
    in_clear = False

    def __init__(self, channel: grpc.Channel, link: Link) -> None:
        self._peer = link.peer
        self._on_wait = link.on_wait
        self._outbox: queue.SimpleQueue[Iterator[bytes] | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        step: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(_METHOD)
        self._call = step(_drain(self._outbox))
        #: Whether the call has not ended, as far as this side knows.
        self.is_active: Callable[[], bool] = self._call.is_active
        self._replies = GrpcReplies(CallMessages(self._call), link.peer)
        self.on_end(_closer(self._outbox, self._ended))

    @property
    def alive(self) -> bool:
        """Whether the call has not ended, as far as this side knows."""
        return self.is_active()

    def open(self, request: OpenRequest) -> OpenedStream:
        """Send the first request. Raises the PsError that the shard answers, or Unavailable."""
        self._send(request)
        with rpc_errors(self._peer):
            while isinstance(reply := self._replies.next(), WaitingAnswer):
                self._on_wait(reply.reason)
        if not isinstance(reply, OpenedStream):
            raise InternalError(f"{self._peer} did not answer Open", shard=str(self._peer.shard))
        return reply

    def keep_memory(self) -> None:
        """Nothing is mapped here."""

    def push(self, header: PushHeader, payload: Sequence[memoryview], rows: Sequence[memoryview] = ()) -> None:
        """Queue one push."""
        header.segment = 0
        self._send(header, [*payload, *rows])

    def look_up(self, header: LookupHeader, ids: Sequence[memoryview]) -> None:
        """Queue the request."""
        self._send(header, ids)

    def stage(self, span: Range, piece: memoryview, ready: Callable[[], None]) -> None:
        """Queue one range."""

        def messages() -> Iterator[bytes]:
            ready()
            yield from _messages(StageRequest(*span), [piece])

        self._outbox.put(messages())

    def fetch(self) -> None:
        """Queue the request."""
        self._send(FetchRequest())

    def arrive(self, phase: int) -> None:
        """Queue the message."""
        self._send(ArriveRequest(phase))

    def receive(self, place: Place) -> Answer | None:
        """The next answer. An exception ends the call, since the rest of the answer would be read as the next one."""
        try:
            with rpc_errors(self._peer):
                return read_answer(self._replies, place, self._on_wait, self._peer)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """End the call now."""
        self._call.cancel()

    def close(self) -> None:
        """End the call, and gRPC's thread with it."""
        self._call.cancel()
        self._outbox.put(None)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, on a thread of gRPC, when the call ends; at once when it has ended."""
        if not self._call.add_callback(callback):
            callback()

    def reason(self) -> PsError | None:
        """The error that the shard ended the call with; None: no error. A broken side channel does not have it."""
        if not self._ended.wait(times.END_SECONDS) or self._call.code() is grpc.StatusCode.OK:
            return None
        failed: Any = self._call  # a failed call is an RpcError, which grpc's types do not declare
        return typed(failed, self._peer)

    def _send(self, message: StepRequest, payload: Sequence[memoryview] = ()) -> None:
        self._outbox.put(_messages(message, payload))


def _messages(message: StepRequest, payload: Sequence[memoryview]) -> Iterator[bytes]:
    """``message`` with ``payload`` in it; where that is larger than a chunk, chunks follow.

    Each is built when it is asked for. Raises InvalidRequest at once, for an option that no message holds.
    """
    if sum(map(len, payload)) <= CHUNK_BYTES:
        return _joined(request_to_pieces(message, payload))
    return chain(_joined(request_to_pieces(message)), STEP_REQUESTS.chunks(payload))


def _joined(pieces: Sequence[bytes | memoryview]) -> Iterator[bytes]:
    yield b"".join(pieces)


def _drain(outbox: queue.SimpleQueue[Iterator[bytes] | None]) -> Iterator[bytes]:
    while (messages := outbox.get()) is not None:
        yield from messages


def _closer(outbox: queue.SimpleQueue[Iterator[bytes] | None], ended: threading.Event) -> Callable[[], None]:
    """Refers to its arguments alone: the call must not keep the transport alive."""

    def close() -> None:
        outbox.put(None)
        ended.set()

    return close
