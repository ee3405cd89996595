"""Messages of a step stream: small payloads inside them, answers read into place, errors as exceptions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError

from ps_protocol.cluster.answers import Answer, RowsAnswer, StepAnswer, StepReply, WaitingAnswer
from ps_protocol.errors import InternalError, InvalidRequest, PsError, Unavailable
from ps_protocol.rpc.client_errors import translate
from ps_protocol.wire.chunks import STEP_REPLIES, ChunkedStream, ChunkReceiver
from ps_protocol.wire.convert.step import reply_from_bytes

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
    if payload:
        fill(pieces, payload)
    elif pieces:
        replies.payload(answer, pieces)
    return answer


def read_payload(replies: Iterator[bytes], stream: ChunkedStream, pieces: Sequence[memoryview], peer: Peer) -> None:
    """Read chunks until ``pieces`` are full. Raises Unavailable, InternalError, InvalidRequest."""
    receiver = ChunkReceiver(stream, pieces, str(peer), partial(InternalError, shard=str(peer.shard)))
    receiver.receive(lambda: read_message(replies, peer))
