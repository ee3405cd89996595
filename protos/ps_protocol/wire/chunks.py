"""Sends and receives payloads as chunks on gRPC streams: one loop that checks order, sizes and ends, for every call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from ps_protocol.errors import InvalidRequest, PsError
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.frames import CHUNK_BYTES, Scatter, chunk_head, cut, encode_chunk, parse_chunk

#: Messages that may be a chunk.
_Message = (
    pb.StepRequest
    | pb.StepReply
    | pb.LoadRequest
    | pb.LoadRowsRequest
    | pb.SaveReply
    | pb.SaveBucketsReply
    | pb.FeedReply
    | pb.FollowReply
    | pb.GetPieceReply
)


@dataclass(frozen=True, slots=True)
class ChunkedStream:
    """The messages of one direction of a call; some of them are chunks."""

    message: type[_Message]
    #: Number of the field ``chunk``.
    field: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "field", self.message.DESCRIPTOR.fields_by_name["chunk"].number)

    def chunks(self, pieces: Iterable[memoryview]) -> Iterator[bytes]:
        """The messages of one payload; each is built when it is asked for."""
        for position, parts in cut(pieces):
            yield encode_chunk(self.field, position, parts)

    def parse(self, data: bytes) -> tuple[int, memoryview] | None:
        """Position and payload of a chunk; None for any other message, and for bytes that are none."""
        if (chunk := parse_chunk(self.field, data)) is not None:
            return chunk
        # frames.py leaves the other valid forms of a chunk to the generated class.
        try:
            message = self.message.FromString(data)
        except DecodeError:
            return None
        if message.WhichOneof("body") != "chunk":
            return None
        return message.chunk.position, memoryview(message.chunk.payload)

    def kind(self, data: bytes) -> str:
        """What a message that is no chunk is, for an error."""
        try:
            return self.message.FromString(data).WhichOneof("body") or "nothing"
        except DecodeError:
            return f"{len(data)} bytes that are no message"


STEP_REQUESTS = ChunkedStream(pb.StepRequest)
STEP_REPLIES = ChunkedStream(pb.StepReply)
LOAD_REQUESTS = ChunkedStream(pb.LoadRequest)
LOAD_ROWS_REQUESTS = ChunkedStream(pb.LoadRowsRequest)
SAVE_REPLIES = ChunkedStream(pb.SaveReply)
SAVE_BUCKETS_REPLIES = ChunkedStream(pb.SaveBucketsReply)
FEED_REPLIES = ChunkedStream(pb.FeedReply)
FOLLOW_REPLIES = ChunkedStream(pb.FollowReply)
PIECE_REPLIES = ChunkedStream(pb.GetPieceReply)


class ChunkReceiver:
    """Puts one payload into consecutive pieces of memory. Used by one reader; it does no I/O itself."""

    def __init__(
        self,
        stream: ChunkedStream,
        pieces: Sequence[memoryview],
        what: str,
        error: Callable[..., PsError] = InvalidRequest,
    ) -> None:
        """``what`` names the sender or the call in errors, which ``error`` makes."""
        self._stream = stream
        self._scatter = Scatter(pieces)
        self._what = what
        self._error = error
        #: Of the chunks, the last one aside.
        self._chunk_bytes = CHUNK_BYTES

    @property
    def expected_bytes(self) -> int:
        """Of the whole payload."""
        return self._scatter.expected_bytes

    @property
    def missing_bytes(self) -> int:
        """Of the payload, that have not arrived."""
        return self._scatter.expected_bytes - self._scatter.received_bytes

    @property
    def complete(self) -> bool:
        """Whether the whole payload has arrived."""
        return self._scatter.complete

    def take(self, data: bytes | None) -> None:
        """Take the next message; None: the stream has ended.

        Raises the receiver's error for a message that is no chunk and for the end, InvalidRequest for a chunk that is
        not the next piece of the payload.
        """
        scatter = self._scatter
        position, missing = scatter.received_bytes, scatter.expected_bytes - scatter.received_bytes
        if data is not None:
            # Mostly the bytes before the payload are known. Code is cold after the copy of each chunk: the less, the
            # better.
            head = chunk_head(self._stream.field, position, min(missing, self._chunk_bytes))
            if data.startswith(head) and len(data) == len(head) + min(missing, self._chunk_bytes):
                scatter.write(position, memoryview(data)[len(head) :])
                return
        chunk = None if data is None else self._stream.parse(data)
        if chunk is None:
            came = "the end of the stream" if data is None else f"a message of kind {self._stream.kind(data)}"
            raise self._error(
                f"{self._what}: {came} came before the payload was whole", expected=f"{missing} more bytes"
            )
        self._chunk_bytes = len(chunk[1])
        scatter.write(*chunk)

    def receive(self, read: Callable[[], bytes | None]) -> None:
        """Take what ``read`` returns until the payload is whole."""
        scatter = self._scatter
        while scatter.received_bytes < scatter.expected_bytes:
            # A message lives until the next one is there: freed before, its pages go back to the system and are
            # faulted in again for each chunk.
            data = read()
            self.take(data)

    async def receive_async(self, read: Callable[[], Awaitable[bytes | None]]) -> None:
        """As ``receive``, on an event loop."""
        scatter = self._scatter
        while scatter.received_bytes < scatter.expected_bytes:
            data = await read()
            self.take(data)
