"""The gRPC transport: all messages on the long-lived Step stream. Works everywhere, and anchors the side channels."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import chain
from typing import Any

import grpc

from ps_protocol import times
from ps_protocol.cluster.answers import Answer, OpenedStream, StepReply, WaitingAnswer
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
from ps_protocol.errors import InternalError, PsError, Unavailable
from ps_protocol.interruptible import next_item, without_signals
from ps_protocol.model.layout import Range
from ps_protocol.wire.chunks import STEP_REPLIES, STEP_REQUESTS
from ps_protocol.wire.convert.step import request_to_pieces
from ps_protocol.wire.frames import CHUNK_BYTES
from ps_worker.transport.base import Link, Place, chunk_receiver, parse_reply, read_answer, typed

_METHOD = "/ps_protocol.v1.Shard/Step"

_Outbox = queue.SimpleQueue[Iterator[bytes] | Callable[[], object] | None]
"""What gRPC's thread does next: it sends messages, or it calls; None: it ends."""

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
    """Used by the training thread; gRPC's own thread sends and receives, in the order of the outbox.

    Sending never waits. At most one encoded chunk is in memory: gRPC asks for the next when the last is on its way.
    gRPC's thread receives only a message that comes without another request, since it sends nothing until then. What
    it receives goes to the caller from the thread in which gRPC decodes it, and this thread takes the outbox again.

    When the call ends, for whatever reason, the outbox is closed, so gRPC's thread ends too. Receiving can be
    interrupted by Ctrl-C. A handler that raises while the call has a lock of gRPC may leave it locked, and the call
    waits for ever; so another thread begins the call, ends it and asks it for its error.
    """

    transport = Transport.GRPC
    gradients = ()
    in_clear = False

    def __init__(self, channel: grpc.Channel, link: Link) -> None:
        self._peer = link.peer
        self._on_wait = link.on_wait
        self._outbox: _Outbox = queue.SimpleQueue()
        #: The messages of the shard, then None.
        self._arrived: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        #: Has an item once the call has ended. Locks of ``threading`` have the same defect as gRPC's.
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        hand_over = _handing_over(self._arrived)
        step: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            _METHOD, response_deserializer=hand_over
        )
        self._call = without_signals(lambda: step(_requests(self._outbox)))
        self._receive_one = partial(next, self._call, None)
        #: Whether a message has been asked for that has not been taken.
        self._is_expecting = False
        self.on_end(_closer(self._outbox, self._ended, self._arrived))

    @property
    def alive(self) -> bool:
        """Whether the call has not ended, as far as this side knows."""
        return self._ended.empty()

    def open(self, request: OpenRequest) -> OpenedStream:
        """Send the first request. Raises the PsError that the shard answers, or Unavailable."""
        self._send(request)
        while isinstance(reply := self.next(), WaitingAnswer):
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
        self._expect()

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
            return read_answer(self, place, self._on_wait, self._peer)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """End the call now."""
        self._ended.put(None)
        without_signals(self._call.cancel)

    def close(self) -> None:
        """End the call, and gRPC's thread with it."""
        self.cancel()
        self._outbox.put(None)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, on a thread of gRPC, when the call ends; at once when it has ended."""
        if not without_signals(partial(self._call.add_callback, callback)):
            callback()

    def reason(self) -> PsError | None:
        """The error that the shard ended the call with; None: no error. A broken side channel does not have it."""
        try:
            self._ended.put(self._ended.get(timeout=times.END_SECONDS))
        except queue.Empty:
            return None
        return without_signals(self._error)

    def _error(self) -> PsError | None:
        if self._call.code() is grpc.StatusCode.OK:
            return None
        failed: Any = self._call  # a failed call is an RpcError, which grpc's types do not declare
        return typed(failed, self._peer)

    # -- ``Replies``

    def next(self) -> StepReply:
        """The next message."""
        return parse_reply(self._read(), self._peer)

    def payload(self, answer: Answer, pieces: Sequence[memoryview]) -> None:
        """Chunks until all of ``pieces`` is written."""
        receiver = chunk_receiver(STEP_REPLIES, pieces, self._peer)

        def read() -> bytes:
            chunk = self._read()
            if len(chunk) < receiver.missing_bytes:  # it is not the last one: another comes while it is written
                self._expect()
            return chunk

        receiver.receive(read)

    def _expect(self) -> None:
        """Have gRPC's thread receive a message, which comes without another request, after what it has to send."""
        if not self._is_expecting:
            self._is_expecting = True
            self._outbox.put(self._receive_one)

    def _read(self) -> bytes:
        self._expect()
        if (message := next_item(self._arrived)) is None:
            self._arrived.put(None)  # the end stays the end
            closed = Unavailable(f"{self._peer} closed the stream", shard=str(self._peer.shard))
            raise self.reason() or closed
        self._is_expecting = False
        return message

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


def _requests(outbox: _Outbox) -> Iterator[bytes]:
    """Runs in gRPC's thread."""
    while (work := outbox.get()) is not None:
        if callable(work):
            with suppress(grpc.RpcError):  # a call that has failed closes the outbox
                work()
        else:
            yield from work


def _handing_over(arrived: queue.SimpleQueue[bytes | None]) -> Callable[[bytes], bytes]:
    """Stands for a deserializer: the bytes go to ``arrived``, and who receives from the call gets nothing of them."""

    def hand_over(message: bytes) -> bytes:
        arrived.put(message)
        return b""

    return hand_over


def _closer(
    outbox: _Outbox, ended: queue.SimpleQueue[None], arrived: queue.SimpleQueue[bytes | None]
) -> Callable[[], None]:
    """Refers to its arguments alone: the call must not keep the transport alive."""

    def close() -> None:
        outbox.put(None)
        ended.put(None)
        arrived.put(None)

    return close
