"""Payloads written by hand are the generated classes' messages, and no bytes break the readers."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.chunks import LOAD_REQUESTS, SAVE_REPLIES, STEP_REPLIES, STEP_REQUESTS
from ps_protocol.wire.frames import Scatter, cut, encode_chunk, parse_chunk, pieces_of, split_payload, varint

MESSAGES = [(stream.field, stream.message) for stream in (STEP_REQUESTS, STEP_REPLIES, LOAD_REQUESTS, SAVE_REPLIES)]
POSITIONS = st.integers(0, (1 << 64) - 1)


@pytest.mark.parametrize(("field", "message"), MESSAGES)
@given(position=POSITIONS, pieces=st.lists(st.binary(max_size=300), max_size=4))
def test_a_chunk_written_by_hand_is_the_generated_message(field, message, position, pieces):
    wanted = message(chunk=pb.Chunk(position=position, payload=b"".join(pieces)))
    assert message.FromString(encode_chunk(field, position, pieces)) == wanted


@pytest.mark.parametrize(("field", "message"), MESSAGES)
@given(position=POSITIONS, payload=st.binary(min_size=1, max_size=300))
def test_a_generated_chunk_is_read_by_hand(field, message, position, payload):
    data = message(chunk=pb.Chunk(position=position, payload=payload)).SerializeToString()
    parsed = parse_chunk(field, data)
    assert parsed is not None
    assert (parsed[0], bytes(parsed[1])) == (position, payload)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        pb.StepRequest(push=pb.PushHeader(sequence=1)).SerializeToString(),
        b"\x1a\x05\x12\x7f",  # a payload that lies about its length
        b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # a varint beyond 64 bits
        b"\x1a\x04\x12\x00\x08\x01",  # valid, but the fields are in another order: left to protobuf
    ],
)
def test_what_is_not_a_chunk_in_canonical_form_is_left_to_the_generated_class(data):
    assert parse_chunk(STEP_REQUESTS.field, data) is None


PUSH = pb.StepRequest.DESCRIPTOR.fields_by_name["push"].number
PAYLOADS = {PUSH: pb.PushHeader.DESCRIPTOR.fields_by_name["payload"].number}

HEADERS = st.builds(
    pb.PushHeader,
    sequence=POSITIONS,
    absent=st.lists(st.integers(0, 1000), max_size=5),
    weight=st.floats(width=32, allow_nan=False),
    squared_norm=st.floats(allow_nan=False),
    traceparent=st.text(max_size=9),
    with_buffers=st.booleans(),
)


def with_payload(header: pb.PushHeader, payload: bytes) -> bytes:
    body = header.SerializeToString() + varint(PAYLOADS[PUSH] << 3 | 2) + varint(len(payload)) + payload
    return varint(PUSH << 3 | 2) + varint(len(body)) + body


@given(HEADERS, st.binary(max_size=300))
def test_a_payload_at_the_end_of_a_message_is_split_from_it(header, payload):
    number, fields, found = split_payload(with_payload(header, payload), PAYLOADS)
    assert (number, bytes(found)) == (PUSH, payload)
    assert pb.PushHeader.FromString(fields) == header


@given(HEADERS, st.binary(max_size=40), st.integers(0, 200), st.integers(0, 255), st.integers(0, 20))
def test_what_is_split_from_damaged_bytes_is_what_protobuf_reads(header, payload, at, byte, missing):
    data = bytearray(with_payload(header, payload))
    data[at % len(data)] = byte
    data = bytes(data[: len(data) - missing])
    if (parts := split_payload(data, PAYLOADS)) is None:
        return
    number, fields, found = parts
    try:
        read = pb.StepRequest.FromString(data)
        header = pb.PushHeader.FromString(fields)
    except DecodeError:
        return
    header.payload = bytes(found)
    assert (number, header) == (PUSH, read.push)


@given(st.binary(max_size=60))
def test_no_bytes_break_the_split(tail):
    split_payload(tail, PAYLOADS)
    split_payload(bytes((PUSH << 3 | 2, len(tail))) + tail, PAYLOADS)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        pb.StepRequest(arrive=pb.Arrive(phase=3)).SerializeToString(),
        pb.StepRequest(push=pb.PushHeader(sequence=1)).SerializeToString(),
        with_payload(pb.PushHeader(), b"abc") + b"\x08\x01",
        with_payload(pb.PushHeader(traceparent="t" * (4 << 10)), b"abc"),  # begins too late to be looked for
    ],
)
def test_a_message_without_a_payload_at_its_end_is_left_to_the_generated_class(data):
    assert split_payload(data, PAYLOADS) is None


@given(sizes=st.lists(st.integers(0, 40), max_size=8), chunk_bytes=st.integers(1, 50))
def test_a_payload_cut_into_chunks_and_scattered_is_the_payload(sizes, chunk_bytes):
    source = [bytes((i * 7 + j) % 256 for j in range(size)) for i, size in enumerate(sizes)]
    target = [bytearray(size) for size in sizes]
    scatter = Scatter([memoryview(piece) for piece in target])
    for position, pieces in cut([memoryview(piece) for piece in source], chunk_bytes):
        payload = b"".join(pieces)
        assert 0 < len(payload) <= chunk_bytes
        scatter.write(position, memoryview(payload))
    assert scatter.complete
    assert [bytes(piece) for piece in target] == source


def test_pieces_are_views_of_the_region():
    region = bytearray(range(10))
    pieces = pieces_of(memoryview(region), [(0, 2), (5, 9)])
    pieces[1][0] = 99
    assert region[5] == 99
