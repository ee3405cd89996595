"""The interface of every transport of a step stream, and what they do alike: answers read into place, errors as
exceptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError

from ps_protocol.cluster.answers import Answer, RowsAnswer, StepAnswer, StepReply, WaitingAnswer
from ps_protocol.cluster.requests import LookupHeader, PushHeader
from ps_protocol.cluster.transport import Transport
from ps_protocol.errors import InternalError, InvalidRequest, PsError, Unavailable
from ps_protocol.model.layout import Layout, Range
from ps_protocol.rpc.client_errors import translate
from ps_protocol.security.security import OFF, Security
from ps_protocol.wire.chunks import STEP_REPLIES, ChunkedStream, ChunkReceiver
from ps_protocol.wire.convert.step import reply_from_bytes
from ps_protocol.wire.shared_memory import KeptMappings, SharedMemory

#: Gives the memory for the payload of an answer, as consecutive pieces.
Place = Callable[[Answer], Sequence[memoryview]]


@dataclass(frozen=True, slots=True)
class Peer:
    """A shard, for messages."""

    shard: int
    address: str

    def __str__(self) -> str:
        return f"shard {self.shard} at {self.address}"


def fill(pieces: Sequence[memoryview], data: bytes | memoryview) -> None:
    """Write ``data``, which is long enough for all ``pieces``, to them."""
    at = 0
    for piece in pieces:
        piece[:] = data[at : at + len(piece)]
        at += len(piece)


class Replies(Protocol):
    """The messages of a shard on one stream. Raises PsError."""

    def next(self) -> StepReply:
        """The next message that is not part of a payload."""
        ...

    def payload(self, answer: Answer, pieces: Sequence[memoryview]) -> None:
        """Receive the payload that ``answer`` announced, and does not contain, into ``pieces``."""
        ...


@contextmanager
def rpc_errors(peer: Peer) -> Iterator[None]:
    """Failed gRPC calls inside raise the PsError that they mean, naming ``peer``."""
    try:
        yield
    except grpc.RpcError as failed:
        raise typed(failed, peer) from failed


def typed(failed: grpc.RpcError, peer: Peer) -> PsError:
    """The PsError that ``failed`` means."""
    error = translate(failed, str(peer))
    error.shard = error.shard or str(peer.shard)
    return error


def read_message(replies: Iterator[bytes], peer: Peer) -> bytes:
    """The next message. Raises Unavailable when the shard ended the stream."""
    data = next(replies, None)
    if data is None:
        raise Unavailable(f"{peer} closed the stream", shard=str(peer.shard))
    return data


def parse_reply(data: bytes | bytearray, peer: Peer) -> StepReply:
    """Raises InternalError for bytes that are no StepReply, for a chunk, and for what this version does not know."""
    try:
        reply = reply_from_bytes(bytes(data))
    except DecodeError as error:
        raise InternalError(f"{peer} sent bytes that are no StepReply", shard=str(peer.shard)) from error
    except InvalidRequest as error:
        raise InternalError(
            f"{peer} sent a message that is not understood: {error.message}",
            shard=str(peer.shard),
            expected=error.expected,
            actual=error.actual,
            remedy=error.remedy,
        ) from error
    if isinstance(reply, str):
        raise InternalError(f"{peer} sent {reply} instead of a result", shard=str(peer.shard))
    return reply


class GrpcReplies:
    """The replies of one gRPC call."""

    def __init__(self, messages: Iterator[bytes], peer: Peer) -> None:
        self._messages = messages
        self._peer = peer

    def next(self) -> StepReply:
        """The next message."""
        return parse_reply(read_message(self._messages, self._peer), self._peer)

    def payload(self, answer: Answer, pieces: Sequence[memoryview]) -> None:
        """Chunks until all of ``pieces`` is written."""
        read_payload(self._messages, STEP_REPLIES, pieces, self._peer)


def read_answer(replies: Replies, place: Place, on_wait: Callable[[str], None], peer: Peer) -> Answer | None:
    """The next result or rows, the payload written to ``place``; None: the shard waits, ``on_wait`` has the reason.

    Raises Unavailable, and InternalError for anything that breaks the protocol.
    """
    answer = replies.next()
    if isinstance(answer, WaitingAnswer):
        on_wait(answer.reason)
        return None
    if not isinstance(answer, (StepAnswer, RowsAnswer)):
        raise InternalError(f"{peer} sent {type(answer).__name__} instead of a result", shard=str(peer.shard))
    payload, answer.payload = answer.payload, b""
    pieces = place(answer) if answer.payload_bytes else []
    expected, actual = sum(map(len, pieces)), len(payload) or answer.payload_bytes
    if not expected == actual == answer.payload_bytes:
        is_rows = isinstance(answer, RowsAnswer)
        raise InternalError(
            f"{peer} " + ("sent other rows than were asked" if is_rows else "lays its slices out differently"),
            shard=str(peer.shard),
            expected=f"{expected} bytes",
            actual=f"{actual} bytes",
            remedy="use the same torch-ps on both sides",
        )
    if payload and len(pieces) == 1:
        pieces[0][:] = payload
    elif payload:
        fill(pieces, payload)
    elif pieces:
        replies.payload(answer, pieces)
    return answer


def read_payload(replies: Iterator[bytes], stream: ChunkedStream, pieces: Sequence[memoryview], peer: Peer) -> None:
    """Read chunks until ``pieces`` are full. Raises Unavailable, InternalError, InvalidRequest."""
    chunk_receiver(stream, pieces, peer).receive(partial(read_message, replies, peer))


def chunk_receiver(stream: ChunkedStream, pieces: Sequence[memoryview], peer: Peer) -> ChunkReceiver:
    """Writes the chunks of ``peer`` to ``pieces``. Raises InternalError, InvalidRequest."""
    return ChunkReceiver(stream, pieces, str(peer), partial(InternalError, shard=str(peer.shard)))


@dataclass(frozen=True, slots=True)
class Link:
    """What a transport knows of its stream."""

    peer: Peer
    #: The positions of the model's slices in the shard's region.
    layout: Layout
    #: Called with the reason when an answer takes long.
    on_wait: Callable[[str], None]
    security: Security = OFF
    #: Memory of streams that have ended, which the shard may give this one again.
    memory: KeptMappings = field(default_factory=KeptMappings)
    #: How many memories for gradients to ask for, where the shard shares them.
    segments: int = 1


class ClientTransport(Protocol):
    """One open stream to a shard. Used by the training thread.

    Sending neither waits nor fails: ``receive`` reports a broken stream.
    """

    transport: Transport

    @property
    def in_clear(self) -> bool:
        """Whether payloads can be read on the network although this process uses TLS."""
        ...

    @property
    def alive(self) -> bool:
        """Whether the stream has not ended, as far as this side knows."""
        ...

    @property
    def gradients(self) -> Sequence[SharedMemory]:
        """Memories that the shard applies gradients from, ``segments`` of ``Link``; none where a push carries them."""
        ...

    def keep_memory(self) -> None:
        """Before ``close``: the shard's memory that is mapped here may be given to the next stream of ``Link``."""
        ...

    def push(self, header: PushHeader, payload: Sequence[memoryview], rows: Sequence[memoryview] = ()) -> None:
        """Begin one push; ``payload`` and ``rows`` must not change until its result has been received.

        ``rows`` are sent also where the shard maps ``gradients``; the number in ``header``, from 1, says in which the
        gradients are.
        """
        ...

    def look_up(self, header: LookupHeader, ids: Sequence[memoryview]) -> None:
        """Ask for rows; ``ids`` must not change until they have come."""
        ...

    def stage(self, span: Range, piece: memoryview, ready: Callable[[], None]) -> None:
        """Send bytes ``span`` of the next push's region ahead; ``piece`` holds them once ``ready`` has returned.

        Where the shard maps ``gradients`` there is nothing to send.
        """
        ...

    def fetch(self) -> None:
        """Ask for the newest parameters and buffers."""
        ...

    def arrive(self, phase: int) -> None:
        """Tell the shard that this worker enters the barrier that ends ``phase``."""
        ...

    def receive(self, place: Place) -> Answer | None:
        """The answer to the oldest push, fetch or lookup without one, its payload in place. Raises PsError.

        None: the shard says that it waits, as it does every few seconds. An exception, Ctrl-C for one, ends the stream.
        """
        ...

    def cancel(self) -> None:
        """From any thread: end the stream, so that ``receive`` raises Unavailable. ``close`` comes later."""
        ...

    def close(self) -> None:
        """End the stream now; it reads no payload after this call. Safe to repeat."""
        ...
