"""Open side channels of a real shard against workers that break the protocol, stall and vanish."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from contextlib import nullcontext, suppress

import pytest

from ps_protocol.cluster.answers import StepAnswer
from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Layout
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.carrier import PlainCarrier
from ps_protocol.wire.socket_messages import LENGTH, MAX_MESSAGE_BYTES, framed
from ps_server.shard.transport.socket_stream import SocketServerTransport
from ps_server.state.region import Region
from tests.support.loops import in_loop
from tests.support.shards import (
    StubStream,
    simple_spec,
    wait_until,
    whole_map,
)
from tests.support.side_channels import (
    BOTH,
    BULK,
    FAR_TOO_LARGE,
    LARGE,
    SHM,
    STALLED_SOON,
    header,
    unharmed,
    worker_of,
)
from tests.transports.support import UvloopThread


@pytest.fixture(autouse=True)
def _uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.shards.LoopThread", UvloopThread)


BAD_MESSAGES = {
    "a chunk": ({"chunk": pb.Chunk(payload=b"x")}, "a chunk came that belongs to no payload"),
    "a second Attach": ({"attach": pb.Attach()}, "not a message of an open step stream"),
    "a second Confirm": ({"confirm": pb.Confirm()}, "not a message of an open step stream"),
    "a second Open": ({"open": pb.Open(model="model")}, "not a message of an open step stream"),
    "an empty message": ({}, "not a message of an open step stream"),
    "an inline payload that is too short": ({"push": header(payload=b"1234")}, "the wrong size"),
    "an inline payload that is too long": ({"push": header(payload=bytes(9999))}, "the wrong size"),
    "a payload where there is nothing to send": ({"push": header(absent=[0, 1], payload=b"1")}, "the wrong size"),
    "an absent slice that does not exist": ({"push": header(absent=[9])}, "an absent slice does not exist"),
    "a segment that was not asked for": ({"push": header(segment=2)}, "a push names"),
    "a segment far away": ({"push": header(segment=(1 << 32) - 1)}, "a push names"),
}


@BOTH
@pytest.mark.parametrize(("body", "text"), BAD_MESSAGES.values(), ids=BAD_MESSAGES)
def test_a_message_that_breaks_the_protocol_ends_the_stream_with_a_typed_error(transport, body, text):
    with unharmed() as (shard, _), worker_of(shard, transport) as worker:
        channel = worker.confirmed()
        channel.send(**body)
        error = worker.error()
        assert isinstance(error, InvalidRequest)
        assert text in str(error)
        assert channel.ended()


def test_a_segment_named_over_bulk_is_refused():
    with unharmed() as (shard, _), worker_of(shard, BULK) as worker:
        channel = worker.confirmed()
        channel.send(push=header(segment=1))
        assert "shared memory that this stream does not have" in str(worker.error())
        assert channel.ended()


@BOTH
@pytest.mark.parametrize(
    ("data", "text"),
    [(LENGTH.pack(MAX_MESSAGE_BYTES + 1), "too long"), (framed(b"\x0a\xff"), "not a StepRequest")],
    ids=["a length above the limit", "noise"],
)
def test_bytes_that_are_no_message_end_the_stream_with_a_typed_error(transport, data, text):
    with unharmed() as (shard, _), worker_of(shard, transport) as worker:
        channel = worker.confirmed()
        channel.socket.sendall(data)
        error = worker.error()
        assert isinstance(error, InvalidRequest)
        assert text in str(error)
        assert channel.ended()


@BOTH
@pytest.mark.parametrize("data", [b"\x05", LENGTH.pack(50), LENGTH.pack(50) + b"half"], ids=["1", "4", "8"])
def test_a_length_that_lies_ends_the_stream_when_the_worker_has_stalled_long_enough(transport, data):
    with unharmed(config=STALLED_SOON) as (shard, _), worker_of(shard, transport) as worker:
        channel = worker.confirmed()
        channel.socket.sendall(data)
        assert channel.ended()
        assert list(worker.stream.replies) == []


@BOTH
@pytest.mark.parametrize("end", ["closes", "resets", "stalls"])
@pytest.mark.parametrize("shapes", [((40, 600),), LARGE], ids=["on the loop", "in a thread"])
def test_a_push_that_breaks_off_in_its_payload_is_nothing_and_its_memory_is_free_again(transport, end, shapes):
    config = STALLED_SOON if end == "stalls" else None
    with unharmed(*shapes, config=config) as (shard, model), worker_of(shard, transport) as worker:
        channel = worker.confirmed()
        before = model.tracker.version
        channel.send(push=header())
        with suppress(ConnectionError) if end == "stalls" else nullcontext():  # it may have stalled for too long by now
            channel.socket.sendall(bytes(70_000))
        if end != "stalls":  # then the memory may be free again before this looks
            wait_until(lambda: model.pool.in_use == 1)
        if end == "resets":
            channel.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if end != "stalls":
            channel.close()
        assert list(worker.stream.replies) == []
        wait_until(lambda: model.pool.in_use == 0)
        assert model.tracker.version == before


@BOTH
def test_a_worker_that_ends_its_grpc_stream_in_the_middle_of_a_payload_ends_the_side_channel(transport):
    with unharmed(*LARGE) as (shard, model), worker_of(shard, transport) as worker:
        channel = worker.confirmed()
        channel.send(push=header())
        channel.socket.sendall(bytes(300_000))
        wait_until(lambda: model.pool.in_use == 1)
        worker.stream.end()
        assert channel.ended()


@BOTH
def test_a_message_on_the_grpc_stream_beside_a_side_channel_ends_both_with_a_typed_error(transport):
    with unharmed() as (shard, _), worker_of(shard, transport) as worker:
        channel = worker.confirmed()
        channel.send(push=header(skipped=True))
        channel.receive()  # so the shard has heard the Confirm, which came on another way
        worker.stream.send(arrive=pb.Arrive(phase=0))
        error = worker.error()
        assert isinstance(error, InvalidRequest)
        assert "attached to a side channel" in str(error)
        assert channel.ended()


@BOTH
def test_who_closes_between_two_messages_ends_its_stream_and_nothing_else(transport):
    with unharmed() as (shard, _), worker_of(shard, transport) as worker:
        channel = worker.confirmed()
        channel.send(push=header(skipped=True))
        channel.receive()
        channel.close()
        assert list(worker.stream.replies) == []


def test_who_stops_reading_in_the_middle_of_a_reply_is_dropped():
    with unharmed(*FAR_TOO_LARGE, config=STALLED_SOON) as (shard, model), worker_of(shard, BULK) as worker:
        channel = worker.confirmed()
        channel.send(push=header(skipped=True))
        assert channel.receive().result.payload_bytes == model.layout.region_bytes
        assert list(worker.stream.replies) == []


def test_who_reads_no_answers_is_dropped_once_they_fill_its_socket():
    with unharmed(config=STALLED_SOON) as (shard, _), worker_of(shard, SHM) as worker:
        channel = worker.confirmed()
        with suppress(ConnectionError, TimeoutError):
            for number in range(1, 20_000):
                channel.send(push=header(sequence=number, clock=number, skipped=True))
        assert list(worker.stream.replies) == []


def test_parameters_that_are_never_released_are_the_shards_again_with_the_end_of_the_stream():
    with unharmed(*LARGE) as (shard, model), worker_of(shard, SHM) as worker:
        channel = worker.confirmed()
        channel.send(push=header(segment=1))
        result = channel.receive().result
        assert (result.segment, len(channel.descriptors)) == (1, 2)
        # Others train on meanwhile, in a copy.
        stub = StubStream(shard, rank=2, incarnation=3)
        for _ in range(3):
            stub.exchange(b"", absent=range(2))
        stub.end()
        worker.close()
        wait_until(lambda: model.pool.in_use == 0)


def test_a_release_of_nothing_is_no_harm():
    with unharmed(*LARGE) as (shard, _), worker_of(shard, SHM) as worker:
        channel = worker.confirmed()
        for number in (1, 2):
            channel.send(release=pb.Release())
            channel.send(push=header(sequence=number, clock=number, segment=1))
            assert channel.receive().result.segment
            channel.send(release=pb.Release())
            channel.send(release=pb.Release())


@in_loop
async def test_a_descriptor_waits_for_room_in_the_socket_as_every_message_does():
    layout = Layout.of(whole_map(simple_spec(*LARGE)), 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    carrier = SocketServerTransport(PlainCarrier(ours), stall_seconds=60)
    region = Region(layout)
    await carrier.share([region])
    theirs.recv(1 << 10)
    filled = 0
    with suppress(BlockingIOError):
        while True:
            filled += ours.send(b"x" * 1000, socket.MSG_DONTWAIT)
    sending = asyncio.create_task(carrier.send_parameters(StepAnswer(), region, layout.ranges()))
    await asyncio.wait([sending], timeout=0.05)
    assert not sending.done()
    received = await asyncio.to_thread(_drain, theirs, filled)
    head, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, theirs, 1 << 10, 4)
    assert (received, len(descriptors)) == (filled, 1)
    assert pb.StepReply.FromString(head[LENGTH.size :]).result.segment == 1
    carrier.released()
    await sending
    os.close(descriptors[0])
    theirs.close()
    carrier.close()


def _drain(sock: socket.socket, size: int) -> int:
    received = 0
    while received < size:
        received += len(sock.recv(size - received))
    return received
