"""Reads what shards send: results, payloads into place, and errors as the exceptions they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError

from ps_protocol.client.errors import translate
from ps_protocol.errors import InternalError, PsError, Unavailable
from ps_protocol.frames import STEP_CHUNK_FIELD, Scatter, cut, encode_chunk, parse_chunk
from ps_protocol.v1 import shard_pb2 as pb

#: What a payload comes with.
Answer = pb.StepResult | pb.Rows

#: Where the payload of an answer goes: consecutive pieces of memory.
Place = Callable[[Answer], Sequence[memoryview]]


@dataclass(frozen=True, slots=True)
class Peer:
    """A shard, for messages."""

    shard: int
    address: str

    def __str__(self) -> str:
        return f"shard {self.shard} at {self.address}"


class Replies(Protocol):
    """What a shard sends on one stream, message by message. Raises PsError."""

    def next(self) -> pb.StepReply:
        """The next message that is no part of a payload."""
        ...

    def payload(self, answer: Answer, pieces: Sequence[memoryview]) -> None:
        """Put the payload that ``answer`` announced, and does not hold itself, into ``pieces``."""
        ...


@contextmanager
def rpc_errors(peer: Peer) -> Iterator[None]:
    """Failed gRPC calls inside raise the PsError they stand for, naming ``peer``."""
    try:
        yield
    except grpc.RpcError as failed:
        raise typed(failed, peer) from failed


def typed(failed: grpc.RpcError, peer: Peer) -> PsError:
    """The PsError that ``failed`` stands for."""
    error = translate(failed, str(peer))
    error.shard = error.shard or str(peer.shard)
    return error


def encode_chunks(field: int, pieces: Iterable[memoryview]) -> Iterator[bytes]:
    """The messages of one payload; each is built when gRPC's sending thread asks for it."""
    for position, parts in cut(pieces):
        yield encode_chunk(field, position, parts)


def read_message(replies: Iterator[bytes], peer: Peer) -> bytes:
    """The next message. Raises Unavailable when the shard ended the stream."""
    data = next(replies, None)
    if data is None:
        raise Unavailable(f"{peer} closed the stream", shard=str(peer.shard))
    return data


def parse_reply(data: bytes | bytearray, peer: Peer) -> pb.StepReply:
    """Raises InternalError for bytes that are no StepReply."""
    try:
        return pb.StepReply.FromString(bytes(data))
    except DecodeError as error:
        raise InternalError(f"{peer} sent bytes that are no StepReply", shard=str(peer.shard)) from error


class GrpcReplies:
    """The replies of one gRPC call."""

    def __init__(self, messages: Iterator[bytes], peer: Peer) -> None:
        self._messages = messages
        self._peer = peer

    def next(self) -> pb.StepReply:
        """The next message."""
        return parse_reply(read_message(self._messages, self._peer), self._peer)

    def payload(self, answer: Answer, pieces: Sequence[memoryview]) -> None:
        """Chunks until all of ``pieces`` is written."""
        read_payload(self._messages, STEP_CHUNK_FIELD, Scatter(pieces), self._peer)


def read_answer(replies: Replies, place: Place, on_wait: Callable[[str], None], peer: Peer) -> Answer | None:
    """The next result or rows, the payload written to ``place``; None after a sign of life, which goes to ``on_wait``.

    Raises Unavailable, and InternalError for anything that breaks the protocol.
    """
    reply = replies.next()
    body = reply.WhichOneof("body")
    if body == "waiting":
        on_wait(reply.waiting.reason)
        return None
    if body not in ("result", "rows"):
        raise InternalError(f"{peer} sent {body} where a result was due", shard=str(peer.shard))
    answer: Answer = reply.result if body == "result" else reply.rows
    pieces = place(answer) if answer.payload_bytes else []
    expected, actual = sum(map(len, pieces)), len(answer.payload) or answer.payload_bytes
    if not expected == actual == answer.payload_bytes:
        raise InternalError(
            f"{peer} " + ("lays its slices out differently" if body == "result" else "sent other rows than were asked"),
            shard=str(peer.shard),
            expected=f"{expected} bytes",
            actual=f"{actual} bytes",
            remedy="use the same torch-ps on both sides",
        )
    if answer.payload:
        Scatter(pieces).write(0, memoryview(answer.payload))
    elif pieces:
        replies.payload(answer, pieces)
    return answer


def read_payload(replies: Iterator[bytes], field: int, scatter: Scatter, peer: Peer) -> None:
    """Read chunks until ``scatter`` is complete. Raises Unavailable, InternalError, InvalidRequest."""
    while not scatter.complete:
        data = read_message(replies, peer)
        chunk = parse_chunk(field, data) or _foreign_chunk(field, data)
        if chunk is None:
            raise InternalError(f"{peer} sent something else in the middle of a payload", shard=str(peer.shard))
        scatter.write(*chunk)


def _foreign_chunk(field: int, data: bytes) -> tuple[int, memoryview] | None:
    """A chunk in a valid form that frames.py leaves to the generated class."""
    kind: type[pb.StepReply | pb.SaveReply] = pb.StepReply if field == STEP_CHUNK_FIELD else pb.SaveReply
    try:
        message = kind.FromString(data)
    except DecodeError:
        return None
    if message.WhichOneof("body") != "chunk":
        return None
    return message.chunk.position, memoryview(message.chunk.payload)
