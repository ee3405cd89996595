"""Reads what shards send: results, payloads into place, and errors as the exceptions they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

from ps_protocol.client.errors import translate
from ps_protocol.errors import InternalError, Unavailable
from ps_protocol.frames import STEP_CHUNK_FIELD, Scatter, cut, encode_chunk, parse_chunk
from ps_protocol.v1 import shard_pb2 as pb

#: Where a result's payload goes: consecutive pieces of memory.
Place = Callable[[pb.StepResult], Sequence[memoryview]]


@dataclass(frozen=True, slots=True)
class Peer:
    """A shard, for messages."""

    shard: int
    address: str

    def __str__(self) -> str:
        return f"shard {self.shard} at {self.address}"


@contextmanager
def rpc_errors(peer: Peer) -> Iterator[None]:
    """Failed gRPC calls inside raise the PsError they stand for, naming ``peer``."""
    try:
        yield
    except grpc.RpcError as failed:
        error = translate(failed, str(peer))
        error.shard = error.shard or str(peer.shard)
        raise error from failed


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


def read_step_reply(replies: Iterator[bytes], peer: Peer) -> pb.StepReply:
    """The next message of a Step or Pull that is not a chunk. Raises Unavailable, InternalError."""
    try:
        return pb.StepReply.FromString(read_message(replies, peer))
    except DecodeError as error:
        raise InternalError(f"{peer} sent bytes that are no StepReply", shard=str(peer.shard)) from error


def read_result(replies: Iterator[bytes], place: Place, on_wait: Callable[[str], None], peer: Peer) -> pb.StepResult:
    """The next result, its payload written to ``place``. Signs of life go to ``on_wait``.

    Raises Unavailable, and InternalError for anything that breaks the protocol.
    """
    while (reply := read_step_reply(replies, peer)).WhichOneof("body") == "waiting":
        on_wait(reply.waiting.reason)
    if reply.WhichOneof("body") != "result":
        raise InternalError(f"{peer} sent {reply.WhichOneof('body')} where a result was due", shard=str(peer.shard))
    result = reply.result
    scatter = Scatter(place(result) if result.payload_bytes else [])
    if scatter.expected_bytes != result.payload_bytes:
        raise InternalError(
            f"{peer} lays its slices out differently",
            shard=str(peer.shard),
            expected=f"{scatter.expected_bytes} bytes",
            actual=f"{result.payload_bytes} bytes",
            remedy="use the same torch-ps on both sides",
        )
    read_payload(replies, STEP_CHUNK_FIELD, scatter, peer)
    return result


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
