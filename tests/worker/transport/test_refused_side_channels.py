"""A side channel that does not open as agreed: the stream goes on over gRPC."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ps_protocol.cluster.answers import Outcome
from ps_protocol.cluster.requests import PushHeader
from ps_protocol.cluster.transport import Transport
from ps_protocol.errors import InvalidRequest
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.convert.errors import to_detail
from ps_protocol.wire.shared_memory import SharedMemory
from ps_protocol.wire.socket_messages import LENGTH, MAX_MESSAGE_BYTES, framed
from ps_worker.transport.base import ClientTransport
from tests.worker.transport.lying_shard import (
    BOTH,
    SHM,
    SIZE,
    answering,
    attached,
    handing,
    memfd,
    opened,
    reply,
)

REFUSALS = {
    "refuses": answering(reply(refused=to_detail(InvalidRequest("no room"))), stay=True),
    "closes at once": lambda sock: None,
    "closes after Attach": answering(b""),
    "answers something else": answering(reply(waiting=pb.Waiting()), stay=True),
    "answers nothing we know": answering(reply(), stay=True),
    "answers noise": answering(framed(b"\xff\xff"), stay=True),
    "announces too much": answering(LENGTH.pack(MAX_MESSAGE_BYTES + 1), stay=True),
    "announces more than it sends": answering(LENGTH.pack(100) + b"x"),
    "is silent": lambda sock: sock.recv(1 << 20) and sock.recv(1),
    "stalls in a length": answering(b"\x01", stay=True),
    "stalls in a message": answering(LENGTH.pack(100) + b"x", stay=True),
    "speaks HTTP": answering(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
}


def goes_on_over_grpc(stream: ClientTransport) -> None:
    assert stream.transport is Transport.GRPC
    assert stream.alive
    stream.push(PushHeader(sequence=1, skipped=True), ())
    assert stream.receive(lambda _: []).outcome == Outcome.SKIPPED


@BOTH
@pytest.mark.parametrize("script", REFUSALS.values(), ids=REFUSALS)
def test_a_side_channel_that_does_not_open_as_agreed_is_left_alone(transport, script, monkeypatch):
    monkeypatch.setattr("ps_worker.times.SIDE_CHANNEL_SECONDS", 0.3)
    with opened(transport, script) as (stream, _):
        goes_on_over_grpc(stream)
        del stream


def read_only() -> int:
    fd = memfd(SIZE)
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)


def pipe() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


DESCRIPTORS = {
    "none": list,
    "too short": lambda: [memfd(SIZE - 1)],
    "empty": lambda: [memfd(0)],
    "not to be written": lambda: [read_only()],
    "no memory": lambda: [pipe()],
    "a folder": lambda: [os.open(Path.cwd(), os.O_RDONLY)],
}


@pytest.mark.parametrize("make", DESCRIPTORS.values(), ids=DESCRIPTORS)
def test_a_gradient_segment_that_cannot_be_used_is_left_alone(make):
    with opened(SHM, handing(*make())) as (stream, _):
        goes_on_over_grpc(stream)
        del stream


def test_an_error_of_another_kind_than_ours_is_not_swallowed(monkeypatch):
    """A defect must not look like a transport that cannot be had."""
    monkeypatch.setattr(SharedMemory, "attach", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError), opened(SHM, attached):
        pass
