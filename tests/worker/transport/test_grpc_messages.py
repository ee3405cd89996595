"""How many messages a payload takes over gRPC. No I/O; costs nothing beside the imports."""

from __future__ import annotations

import pytest

from ps_protocol.cluster.requests import PushHeader
from ps_protocol.errors import InvalidRequest
from ps_protocol.wire.chunks import STEP_REQUESTS
from ps_protocol.wire.convert.step import request_from_bytes
from ps_protocol.wire.frames import CHUNK_BYTES
from ps_worker.transport.grpc_stream import _messages


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES])
def test_a_payload_of_up_to_a_chunk_is_in_its_message(size):
    payload = memoryview(bytes(range(256)) * (CHUNK_BYTES // 256))[:size]
    (only,) = _messages(PushHeader(7), [payload[: size // 3], payload[size // 3 :]])
    read = request_from_bytes(only)
    assert read.sequence == 7
    assert bytes(read.payload) == payload


def test_a_larger_payload_follows_its_message_in_chunks():
    first, *chunks = _messages(PushHeader(7), [memoryview(bytes(CHUNK_BYTES)), memoryview(b"end")])
    assert request_from_bytes(first).payload == b""
    assert [len(STEP_REQUESTS.parse(chunk)[1]) for chunk in chunks] == [CHUNK_BYTES, 3]


def test_an_option_that_no_message_holds_is_refused_before_anything_is_queued():
    with pytest.raises(InvalidRequest, match="'lr' cannot be sent"):
        _messages(PushHeader(options=[{"lr": 1 << 70}]), ())
