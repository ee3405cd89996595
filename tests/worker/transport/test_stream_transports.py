"""A worker's side channel to a shard that misbehaves, stalls or vanishes: a typed error."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress

import pytest

from ps_protocol.cluster.answers import StepAnswer
from ps_protocol.cluster.requests import PushHeader
from ps_protocol.cluster.transport import Transport
from ps_protocol.errors import Fenced, InternalError, InvalidRequest, Unavailable
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire import socket_messages
from ps_protocol.wire.frames import pieces_of
from ps_protocol.wire.socket_messages import LENGTH, framed
from ps_worker.transport.base import ClientTransport
from tests.worker.transport.lying_shard import (
    BOTH,
    LAYOUT,
    SHM,
    SIZE,
    attached,
    hear,
    memfd,
    opened,
    reply,
    result,
    say,
    sends,
    shows,
    stays,
    then,
)

LIES = {
    "closes": ([], Unavailable, "side channel to shard 0 at"),
    "sends noise": ([sends(framed(b"\xff\xff")), stays], InternalError, "no StepReply"),
    "announces too much": ([sends(LENGTH.pack(1 << 31)), stays], InvalidRequest, "too long"),
    "sends something else": ([sends(reply(attached=pb.Attached())), stays], InternalError, "instead of a result"),
    "sends an empty message": ([sends(reply()), stays], InternalError, "instead of a result"),
    "ends in a message": ([sends(LENGTH.pack(9) + b"x")], Unavailable, "shard 0 at"),
    "stalls in a message": ([sends(LENGTH.pack(9) + b"x"), stays], Unavailable, "stalled"),
    "promises too little": ([sends(result(payload_bytes=SIZE - 4)), stays], InternalError, "differently"),
    "promises too much": ([sends(result(payload_bytes=SIZE + 4)), stays], InternalError, "differently"),
    "promises the sky": ([sends(result(payload_bytes=(1 << 64) - 1)), stays], InternalError, "differently"),
    "sends another payload than promised": (
        [sends(result(payload_bytes=SIZE, payload=b"1234")), stays],
        InternalError,
        "differently",
    ),
    "ends in a payload": ([sends(result(payload_bytes=SIZE) + bytes(1000))], Unavailable, "shard 0 at"),
    "stalls in a payload": ([sends(result(payload_bytes=SIZE) + bytes(1000)), stays], Unavailable, "stalled"),
    "names memory without giving it": ([shows(None), stays], InternalError, "did not send it"),
    "names memory after it was given with another message": (
        [lambda sock: with_waiting(sock), shows(None), stays],
        InternalError,
        "did not send it",
    ),
}


def with_waiting(sock: socket.socket) -> None:
    if sock.family == socket.AF_UNIX:
        fd = memfd(SIZE)
        for _ in range(50):
            say(sock, fd, waiting=pb.Waiting(reason="soon"))
        os.close(fd)


def pushed(stream: ClientTransport) -> memoryview:
    """Push once; what the answer is received into."""
    stream.push(PushHeader(sequence=1, clock=1), [memoryview(b"")])
    return memoryview(bytearray(SIZE))


def received(stream: ClientTransport, memory: memoryview) -> StepAnswer:
    """The next result; signs of life are passed over."""
    while (result := stream.receive(lambda r: pieces_of(memory, LAYOUT.ranges(r.absent)))) is None:
        pass
    return result


@BOTH
@pytest.mark.parametrize(("steps", "kind", "text"), LIES.values(), ids=LIES)
def test_an_answer_that_breaks_the_protocol_is_a_typed_error_and_ends_the_stream(transport, steps, kind, text):
    with opened(transport, then(*steps)) as (stream, _):
        assert stream.transport is (Transport.SHM if transport == SHM else Transport.BULK)
        memory = pushed(stream)
        with pytest.raises(kind, match=text):
            received(stream, memory)
        assert not stream.alive
        stream.close()
        del stream


@pytest.mark.parametrize("size_bytes", [0, SIZE - 1])
def test_a_region_that_is_too_short_is_a_typed_error(size_bytes):
    with opened(SHM, then(shows(size_bytes), stays)) as (stream, _):
        memory = pushed(stream)
        with pytest.raises(Unavailable, match=f"{size_bytes} bytes where {SIZE} were promised"):
            stream.receive(lambda _: [memory])
        assert not stream.alive
        del stream


def test_a_region_is_read_from_where_its_number_says():
    def lends(sock: socket.socket) -> None:
        for number, value in ((1, b"a"), (2, b"b")):
            fd = memfd(SIZE)
            os.pwrite(fd, value * SIZE, 0)
            say(sock, fd, result=pb.StepResult(sequence=number, outcome=1, payload_bytes=SIZE, segment=number))
            os.close(fd)
            assert hear(sock).WhichOneof("body") == "release"
        say(sock, result=pb.StepResult(sequence=3, outcome=1, payload_bytes=SIZE, segment=1))
        assert hear(sock).WhichOneof("body") == "release"

    with opened(SHM, then(lends)) as (stream, _):
        memory = pushed(stream)
        found = []
        for _ in range(3):
            stream.receive(lambda _: [memory])
            found.append(bytes(memory[:1]) + bytes(memory[-1:]))
        assert found == [b"aa", b"bb", b"aa"]
        del stream


@BOTH
def test_what_the_shard_ended_the_stream_with_is_raised_though_the_side_channel_says_nothing(transport):
    with opened(transport, then(stays)) as (stream, shard):
        memory = pushed(stream)
        shard.ends.put(Fenced("this worker was replaced"))
        with pytest.raises(Fenced, match="replaced"):
            stream.receive(lambda _: [memory])
        assert not stream.alive
        del stream


@BOTH
def test_a_shard_that_is_silent_between_messages_is_waited_for_as_long_as_it_lives(transport, monkeypatch):
    asked, go = [], threading.Event()
    original = socket_messages.receive_first

    def receive_first(sock, view, alive):
        def still_alive() -> bool:
            asked.append(alive())
            if len(asked) == 2:  # twice as long as what counts as a stall elsewhere
                go.set()
            return asked[-1]

        return original(sock, view, still_alive)

    def waits(_: socket.socket) -> None:
        go.wait(60)

    with opened(transport, then(waits, sends(result()), stays)) as (stream, _):
        memory = pushed(stream)
        monkeypatch.setattr(socket_messages, "receive_first", receive_first)
        stream.receive(lambda _: [memory])
        assert asked[:2] == [True, True]
        del stream


@BOTH
def test_a_push_to_a_shard_that_is_gone_does_not_fail_but_its_answer_does(transport):
    with opened(transport, attached) as (stream, _):
        while not _hung_up(stream):
            pass
        for number in range(1, 4):
            stream.push(PushHeader(sequence=number), [memoryview(bytes(SIZE))])
        stream.arrive(0)
        with pytest.raises(Unavailable, match="shard 0 at"):
            stream.receive(lambda _: [])
        del stream


def _hung_up(stream: ClientTransport) -> bool:
    with suppress(BlockingIOError):
        return not stream._carrier.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)  # type: ignore[attr-defined]
    return False
