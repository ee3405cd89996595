"""The transports on sockets: bulk (payloads on the socket) and shm (payloads in memory that both sides map)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from ps_protocol.cluster.answers import (
    Answer,
    AttachedChannel,
    RefusedChannel,
    RowsAnswer,
    SideChannel,
    StepAnswer,
    StepReply,
)
from ps_protocol.cluster.requests import (
    ArriveRequest,
    AttachRequest,
    ConfirmRequest,
    FetchRequest,
    LookupHeader,
    PushHeader,
    ReleaseRequest,
    StageRequest,
    StepRequest,
)
from ps_protocol.cluster.transport import Transport
from ps_protocol.errors import InternalError, PsError, Unavailable
from ps_protocol.model.layout import Range
from ps_protocol.wire.carrier import Carrier, PlainCarrier
from ps_protocol.wire.convert.step import request_to_bytes, request_to_pieces
from ps_protocol.wire.shared_memory import Recent, SharedMemory
from ps_protocol.wire.socket_messages import (
    INLINE_BYTES,
    framed,
    framed_pieces,
)
from ps_worker.memory.payloads import copy_end_to_end
from ps_worker.transport.base import Link, Place, fill, parse_reply, read_answer
from ps_worker.transport.grpc_stream import GrpcClientTransport


class SharedRegion:
    """A mapped region of a shard, read only: a write to ``_values`` would end the process. Used by its transport."""

    def __init__(self, segment: SharedMemory) -> None:
        #: What is mapped; it may be larger than the region.
        self.memory = segment
        # torch warns of read-only buffers, so the buffer is passed by its address; nothing here writes to it.
        address = np.frombuffer(segment.bytes, dtype=np.uint8).ctypes.data
        memory = (ctypes.c_uint8 * len(segment.bytes)).from_address(address)
        self._values = torch.frombuffer(memory, dtype=torch.uint8)

    def copy_to(self, pieces: Sequence[memoryview], ranges: Sequence[Range]) -> None:
        """Copy ``ranges`` of the region, end to end, into ``pieces``, which hold as many bytes together."""
        targets = [torch.frombuffer(piece, dtype=torch.uint8) for piece in pieces if len(piece)]
        copy_end_to_end(targets, [self._values[begin:end] for begin, end in ranges])


class SocketClientTransport:
    """A ``ClientTransport`` on a side channel of ``anchor``; when one of the two ends, so does the other.

    A thread of its own sends what the socket does not take at once. Sending therefore never waits, and pushes to
    several shards are in progress at the same time.
    """

    def __init__(self, carrier: Carrier, anchor: GrpcClientTransport, link: Link) -> None:
        """``carrier`` is connected."""
        self.transport = Transport.BULK
        #: shm: memories that the shard applies gradients from.
        self.gradients: Sequence[SharedMemory] = ()
        #: shm: memory for the rows of pushes, and for the rows of lookups.
        self._pushed_room: SharedMemory | None = None
        self._rows_room: SharedMemory | None = None
        self._carrier = carrier
        self._anchor = anchor
        self._link = link
        self._sender = ThreadPoolExecutor(1, f"push-{link.peer.shard}")
        self._sending: Future[None] | None = None
        #: Regions of the shard that are mapped here, by the number it gave them.
        self._regions: Recent[SharedRegion] = Recent()
        #: Descriptors that came with the last message and what was read with it, and have not been mapped.
        self._descriptors: list[int] = []
        self._closed = False
        #: Whether a message that does not come is waited for. A shard answers Attach at once.
        self._waits: Callable[[], bool] = lambda: False

    def attach(self, channel: SideChannel, patience_seconds: float) -> None:
        """Present the token and begin to use the channel. Raises PsError, OSError, ValueError where that fails."""
        self._carrier.prepare(patience_seconds)
        self._carrier.send_all([framed(request_to_bytes(AttachRequest(channel.token, self._link.segments)))])
        reply = self.next()
        if isinstance(reply, RefusedChannel):
            raise reply.error
        if not isinstance(reply, AttachedChannel):
            raise InternalError(f"{self._link.peer} did not answer Attach", actual=type(reply).__name__)
        if channel.transport is Transport.SHM:
            self._map(reply)
            self.transport = Transport.SHM
        self._carrier.send_all([framed(request_to_bytes(ConfirmRequest()))])
        self._carrier.prepare()
        self._anchor.on_end(self._carrier.shut_down)
        anchor = self._anchor
        self._waits = lambda: anchor.alive

    def _map(self, attached: AttachedChannel) -> None:
        """Take over the memory that came with ``attached``. Raises OSError, ValueError, InternalError."""
        if self._link.layout.region_bytes:
            size_bytes = self._link.layout.region_bytes
            descriptors = [self._descriptor() for _ in range(self._link.segments)]
            self.gradients = [self._link.memory.map(each, size_bytes, writable=True) for each in descriptors]
        if size := attached.room_bytes:
            self._pushed_room = SharedMemory.attach(self._descriptor(), size, writable=True, whole=False)
            self._rows_room = SharedMemory.attach(self._descriptor(), size, writable=False, whole=False)

    @property
    def in_clear(self) -> bool:
        """Whether payloads can be read on the network although this process uses TLS."""
        plain = isinstance(self._carrier, PlainCarrier)
        return plain and self.transport is Transport.BULK and self._link.security.tls

    @property
    def alive(self) -> bool:
        """Whether the stream has not ended, as far as this side knows."""
        return not self._closed and self._anchor.alive

    def keep_memory(self) -> None:
        """Keep the gradients' memory and the shard's regions mapped for the next stream."""
        mapped = [region.memory for region in self._regions.values()]
        for memory in [*mapped, *self.gradients]:
            self._link.memory.keep(memory)

    def push(self, header: PushHeader, payload: Sequence[memoryview], rows: Sequence[memoryview] = ()) -> None:
        """Send one push, its payload in or behind its header; gradients in shared memory are not sent."""
        if self.gradients and not header.skipped:
            header.segment, payload = header.segment or 1, ()
        else:
            header.segment = 0
        if self._pushed_room is not None and INLINE_BYTES < sum(map(len, rows)) <= len(self._pushed_room.bytes):
            gather(rows, self._pushed_room.bytes)
            header.rows_in_room, rows = True, ()
        self._send(header, [*payload, *rows])

    def look_up(self, header: LookupHeader, ids: Sequence[memoryview]) -> None:
        """Send the request, the ids in or behind it."""
        self._send(header, ids)

    def stage(self, span: Range, piece: memoryview, ready: Callable[[], None]) -> None:
        """Let the sending thread send one range; nothing is sent where gradients are in shared memory."""
        if not self.gradients:
            message = framed(request_to_bytes(StageRequest(*span)))
            self._sending = self._sender.submit(_send_rest, self._carrier, [message, piece], ready)

    def fetch(self) -> None:
        """Send the request."""
        self._send(FetchRequest())

    def arrive(self, phase: int) -> None:
        """Send the message."""
        self._send(ArriveRequest(phase))

    def receive(self, place: Place) -> Answer | None:
        """The next answer; then release the shard's memory.

        A connection that breaks raises the error that the shard ended it with, else Unavailable. Any other exception,
        Ctrl-C for one, ends the stream: the rest of an answer would be read as the next one.
        """
        try:
            answer = read_answer(self, place, self._link.on_wait, self._link.peer)
            if answer and (answer.in_room if isinstance(answer, RowsAnswer) else answer.segment and not answer.copied):
                self._send(ReleaseRequest())
        except (OSError, ValueError) as error:
            raise self._broken(error) from error
        except BaseException:
            self.cancel()
            raise
        return answer

    def cancel(self) -> None:
        """End the anchor; that ends the socket too."""
        self._anchor.cancel()

    def close(self) -> None:
        """End both connections; no payload is read after this call."""
        if self._closed:
            return
        self._closed = True
        self._anchor.close()
        self.abandon()

    def abandon(self) -> None:
        """End the side channel alone; the anchor stays open."""
        self._carrier.shut_down()
        self._sender.shutdown(wait=True)
        self._carrier.close()
        self._drop_descriptors()

    # -- ``Replies``

    def next(self) -> StepReply:
        """The next message."""
        message, descriptors = self._carrier.receive_message(self._waits)
        if descriptors is not None:
            if self._descriptors:
                self._drop_descriptors()
            self._descriptors = descriptors
        return parse_reply(message, self._link.peer)

    def payload(self, answer: Answer, pieces: Sequence[memoryview]) -> None:
        """Receive from the socket, from the region that a result names, or from the memory for rows."""
        if isinstance(answer, RowsAnswer) and answer.in_room:
            fill(pieces, self._rows_room.bytes if self._rows_room is not None else memoryview(b""))
            return
        if not isinstance(answer, StepAnswer) or not answer.segment:
            self._carrier.receive_into(pieces)
            return
        layout = self._link.layout
        region = self._regions.get(answer.segment)
        if region is None:
            memory = self._link.memory.map(self._descriptor(), layout.region_bytes, writable=False)
            region = SharedRegion(memory)
            self._regions.put(answer.segment, region)
        region.copy_to(pieces, layout.ranges(answer.absent, buffers=answer.with_buffers))

    def _drop_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _descriptor(self) -> int:
        if not self._descriptors:
            raise InternalError(f"{self._link.peer} named shared memory but did not send it")
        return self._descriptors.pop(0)

    def _send(self, message: StepRequest, payload: Sequence[memoryview] = ()) -> None:
        """Errors are left to ``receive``, which finds the connection broken."""
        small = sum(map(len, payload)) <= INLINE_BYTES
        rest = framed_pieces(request_to_pieces(message, payload if small else ())) + ([] if small else [*payload])
        try:
            if self._sending is None or self._sending.done():
                rest = self._carrier.send_now(rest)
        except OSError:
            self._carrier.shut_down()
            return
        if rest:
            self._sending = self._sender.submit(_send_rest, self._carrier, rest)

    def _broken(self, error: OSError | ValueError) -> PsError:
        """End the stream; returns why it broke."""
        self._carrier.shut_down()
        peer = self._link.peer
        reason = self._anchor.reason() or Unavailable(
            f"the side channel to {peer} broke: {error}",
            shard=str(peer.shard),
            remedy="see the log of the shard; PS_TRANSPORT=grpc uses no side channels",
        )
        self.cancel()
        return reason


def gather(pieces: Sequence[memoryview], into: memoryview) -> None:
    """Write ``pieces`` end to end."""
    at = 0
    for piece in pieces:
        into[at : at + len(piece)] = piece
        at += len(piece)


def _send_rest(carrier: Carrier, pieces: Sequence[memoryview | bytes], ready: Callable[[], None] | None = None) -> None:
    """On the sending thread. After an error ``receive`` finds the connection ended."""
    try:
        if ready:
            ready()
        carrier.send_all(pieces)
    except OSError:
        carrier.shut_down()
