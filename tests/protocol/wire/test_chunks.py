"""The one loop that receives payloads: every stream, in order, whole, and nothing else."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from ps_protocol.errors import InternalError, InvalidRequest, PsError
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire import chunks
from ps_protocol.wire.chunks import ChunkedStream, ChunkReceiver
from ps_protocol.wire.frames import encode_chunk

STREAMS = [each for each in vars(chunks).values() if isinstance(each, ChunkedStream)]
PIECES = [memoryview(b"abcde"), memoryview(b""), memoryview(b"fgh")]


def received(stream: ChunkedStream, messages: list[bytes], size: int, error: type[PsError] = InvalidRequest) -> bytes:
    """What a receiver of ``size`` bytes makes of ``messages``, with both of its loops."""
    into, other = bytearray(size), bytearray(size)
    first = iter(messages)
    pieces = [memoryview(into)[:2], memoryview(into)[2:]]
    ChunkReceiver(stream, pieces, "the sender", error).receive(lambda: next(first, None))

    async def run() -> None:
        left = iter(messages)

        async def read() -> bytes | None:
            return next(left, None)

        await ChunkReceiver(stream, [memoryview(other)], "the sender", error).receive_async(read)

    asyncio.run(run())
    assert into == other
    return bytes(into)


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.message.DESCRIPTOR.name)
def test_what_is_sent_is_received(stream: ChunkedStream) -> None:
    assert received(stream, list(stream.chunks(PIECES)), 8) == b"abcdefgh"


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.message.DESCRIPTOR.name)
def test_any_valid_form_of_a_chunk_is_received(stream: ChunkedStream) -> None:
    tag = bytes([stream.field << 3 | 2])
    first = tag + b"\x07\x12\x03abc\x08\x00"  # payload before position
    second = tag + b"\x05\x12\x01d\x08\x03"
    assert stream.parse(first) == (0, memoryview(b"abc"))
    assert received(stream, [first, second], 4) == b"abcd"


@given(sizes=st.lists(st.integers(0, 300), max_size=9), form=st.randoms(use_true_random=False))
def test_chunks_of_any_size_in_either_form_make_the_payload(sizes, form) -> None:
    payload = bytes(number % 251 for number in range(sum(sizes)))
    messages, at = [], 0
    for size in sizes:
        part, stream = payload[at : at + size], chunks.STEP_REPLIES
        generated = pb.StepReply(chunk=pb.Chunk(position=at, payload=part)).SerializeToString()
        messages.append(generated if form.random() < 0.5 else encode_chunk(stream.field, at, [part]))
        at += size
    assert received(chunks.STEP_REPLIES, messages, len(payload)) == payload


def is_message(data: bytes) -> bool:
    try:
        pb.StepReply.FromString(data)
    except DecodeError:
        return False
    return True


@given(data=st.binary(max_size=12), size=st.integers(1, 300))
@example(data=b"\x08\x00%\x00\x00\x00\x00\x08", size=1)
def test_a_message_that_only_begins_like_the_next_chunk_is_not_taken_for_it(data, size) -> None:
    stream = chunks.STEP_REPLIES
    whole = encode_chunk(stream.field, 0, [bytes(size)])
    # Bytes behind a chunk may be fields that this version does not know: those are none of its business.
    behind = whole + data + b"\0"
    for odd in (whole[:-1], whole + b"\0", *([] if is_message(behind) else [behind])):
        with pytest.raises(PsError):
            received(stream, [odd], size)


@pytest.mark.parametrize("error", [InvalidRequest, InternalError])
def test_an_end_or_another_message_before_the_last_byte_is_an_error_of_the_receiver(error: type[PsError]) -> None:
    stream = chunks.LOAD_REQUESTS
    (whole,) = stream.chunks([memoryview(b"abc")])
    header = pb.LoadRequest(header=pb.LoadHeader(model="m")).SerializeToString()
    for odd, text in ((header, "a message of kind header"), (b"\xff", "that are no message"), (b"", "nothing")):
        with pytest.raises(error, match=f"the sender: .*{text}.*5 more bytes"):
            received(stream, [whole, odd], 8, error)
    with pytest.raises(error, match=r"the sender: the end of the stream.*5 more bytes"):
        received(stream, [whole], 8, error)


def test_a_chunk_out_of_order_or_beyond_the_payload_is_refused() -> None:
    stream = chunks.STEP_REPLIES
    sent = list(stream.chunks([memoryview(b"abc")]))
    for messages, size in (([*sent, *sent], 8), (sent, 2)):
        with pytest.raises(InvalidRequest, match="does not continue its payload"):
            received(stream, messages, size, InternalError)


def test_a_payload_without_bytes_needs_no_message() -> None:
    assert received(chunks.STEP_REPLIES, [], 0) == b""
