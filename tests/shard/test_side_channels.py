"""Side channels of a real shard against workers that lie, stall and vanish: sockets and generated classes only."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import pytest

from ps_protocol.errors import InvalidRequest, PsError, from_detail
from ps_protocol.layout import Layout
from ps_protocol.messages import LENGTH, MAX_MESSAGE_BYTES, framed, prepare, receive_into, send_all
from ps_protocol.v1 import common_pb2
from ps_protocol.v1 import shard_pb2 as pb
from ps_server.optimizers import Region
from ps_server.shard.carriers.socket_stream import SocketCarrier
from ps_server.shard.model import ShardModel
from ps_server.shard.side_channels import SideChannelConfig
from tests.support.shards import (
    StubStream,
    TestShard,
    error_of,
    flat,
    gradients,
    simple_spec,
    wait_until,
    whole_map,
)
from tests.transports.support import UvloopThread, begin, leaves_no_descriptors, running_shard

BULK, SHM = common_pb2.TRANSPORT_BULK, common_pb2.TRANSPORT_SHM
BOTH = pytest.mark.parametrize("transport", [BULK, SHM], ids=["bulk", "shm"])
HURRIED = SideChannelConfig(stall_seconds=0.2, token_seconds=0.2)

SMALL = ((4, 3), (5,))
LARGE = ((701, 513), (3,))
FAR_TOO_LARGE = ((6 << 20,),)


@pytest.fixture(autouse=True)
def _uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.shards.LoopThread", UvloopThread)


class Channel:
    """One connection to a side channel."""

    def __init__(self, shard: TestShard, offered: pb.SideChannel) -> None:
        self.token = offered.token
        self.descriptors: list[int] = []
        if offered.transport == SHM:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.socket.connect("\0" + offered.name)
        else:
            self.socket = socket.create_connection((shard.address.rpartition(":")[0], offered.port))
        self.socket.settimeout(10)

    def send(self, **body: Any) -> None:
        self.socket.sendall(framed(pb.StepRequest(**body).SerializeToString()))

    def receive(self) -> pb.StepReply:
        """The next message; EOFError when the shard closed the connection."""
        head, descriptors, _, _ = socket.recv_fds(self.socket, LENGTH.size, 4)
        self.descriptors += descriptors
        (length,) = LENGTH.unpack(head + self._exactly(LENGTH.size - len(head)))
        return pb.StepReply.FromString(self._exactly(length))

    def payload(self, size: int) -> bytes:
        return self._exactly(size)

    def ended(self) -> bool:
        """Wait until the shard has closed the connection, whatever it sends before."""
        with suppress(ConnectionError):
            while self.socket.recv(1 << 20):
                pass
        return True

    def attach(self, **fields: Any) -> pb.StepReply:
        self.send(attach=pb.Attach(token=self.token, **fields))
        return self.receive()

    def close(self) -> None:
        self.socket.close()
        while self.descriptors:
            os.close(self.descriptors.pop())

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            if not (more := self.socket.recv(size - len(data))):
                raise EOFError
            data += more
        return data


class Worker:
    """A gRPC stream and, as far as it gets, a side channel beside it."""

    def __init__(self, shard: TestShard, transport: int) -> None:
        self.shard = shard
        self.stream = StubStream(shard, transports=[transport])
        (self.offered,) = self.stream.opened.side_channels
        self.channels: list[Channel] = []

    def connect(self) -> Channel:
        self.channels.append(Channel(self.shard, self.offered))
        return self.channels[-1]

    def confirmed(self, **fields: Any) -> Channel:
        channel = self.connect()
        assert channel.attach(**fields).WhichOneof("body") == "attached"
        channel.send(confirm=pb.Confirm())
        return channel

    def error(self) -> PsError:
        """What the shard ended the stream with."""
        with pytest.raises(grpc.RpcError) as failure:
            next(self.stream.replies)
        return error_of(failure.value)

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        self.stream.cancel()


@contextmanager
def unharmed(
    *shapes: tuple[int, ...], config: SideChannelConfig | None = None, **arguments: Any
) -> Iterator[tuple[TestShard, ShardModel]]:
    """A shard, and a worker that trains before and after the block as if nothing had happened in it."""
    with running_shard({0: 1, 1: 2, 2: 3}, side_channel_config=config, **arguments) as shard:
        model, _ = begin(shard, *(shapes or SMALL))
        bystander = StubStream(shard, rank=1, incarnation=2)
        step = {"absent": range(model.layout.parameter_slices)}  # a step without gradients is one too
        bystander.exchange(b"", **step)
        with leaves_no_descriptors():
            yield shard, model
            wait_until(lambda: model.pool.in_use == 0)
        version = model.tracker.version
        assert bystander.exchange(b"", **step)[0].version == version + 1
        bystander.end()
        wait_until(lambda: model.pool.in_use == 0)


@contextmanager
def worker_of(shard: TestShard, transport: int) -> Iterator[Worker]:
    worker = Worker(shard, transport)
    try:
        yield worker
    finally:
        worker.close()


def header(**fields: Any) -> pb.PushHeader:
    return pb.PushHeader(**({"sequence": 1, "clock": 1} | fields))


# Coming in


@BOTH
def test_who_has_no_valid_token_is_told_so_and_shut_out(transport):
    with unharmed() as (shard, _), worker_of(shard, transport) as worker:
        stranger = worker.connect()
        stranger.token = bytes(32)
        refused = from_detail(stranger.attach().refused)
        assert isinstance(refused, InvalidRequest)
        assert "token is wrong, used, or expired" in str(refused)
        assert stranger.ended()
        # The token is still good for the one who has it.
        assert worker.connect().attach().WhichOneof("body") == "attached"


@BOTH
def test_a_token_admits_once(transport):
    with unharmed() as (shard, _), worker_of(shard, transport) as worker:
        channel, second = worker.confirmed(), worker.connect()
        assert second.attach().WhichOneof("body") == "refused"
        assert second.ended()
        channel.send(push=header(skipped=True))
        assert channel.receive().result.outcome == pb.OUTCOME_SKIPPED


@BOTH
def test_a_token_expires_and_so_does_a_connection_that_shows_none(transport):
    with unharmed(config=HURRIED) as (shard, _), worker_of(shard, transport) as worker:
        silent = worker.connect()
        assert silent.ended()  # it came after the token did, so the token has had its time too
        assert worker.connect().attach().WhichOneof("body") == "refused"


@BOTH
def test_the_end_of_the_stream_ends_its_token(transport):
    with unharmed() as (shard, _), worker_of(shard, transport) as worker:
        worker.stream.end()
        assert worker.connect().attach().WhichOneof("body") == "refused"


STRANGE_BEGINNINGS = {
    "another message than Attach": (framed(pb.StepRequest(confirm=pb.Confirm()).SerializeToString()), "with Attach"),
    "no message": (framed(b"\xff\xff\xff"), "not a StepRequest"),
    "an empty message": (framed(b""), "with Attach"),
    "a chunk": (framed(pb.StepRequest(chunk=pb.Chunk(payload=b"x")).SerializeToString()), "a chunk came"),
    "a length above the limit": (LENGTH.pack(MAX_MESSAGE_BYTES + 1), "too long"),
    "HTTP": (b"GET / HTTP/1.1\r\n\r\n", "too long"),
    "noise": (b"\xff" * 5000, "too long"),
}


@BOTH
@pytest.mark.parametrize(("data", "text"), STRANGE_BEGINNINGS.values(), ids=STRANGE_BEGINNINGS)
def test_a_connection_that_begins_strangely_is_told_so_and_closed(transport, data, text):
    with unharmed() as (shard, _), worker_of(shard, transport) as worker:
        channel = worker.connect()
        channel.socket.sendall(data)
        assert text in str(from_detail(channel.receive().refused))
        assert channel.ended()


@BOTH
@pytest.mark.parametrize("data", [b"\x05", LENGTH.pack(50), LENGTH.pack(50) + b"half"], ids=["1", "4", "8"])
def test_a_connection_that_stalls_in_its_first_message_or_ends_there_is_closed(transport, data):
    with unharmed(config=HURRIED) as (shard, _), worker_of(shard, transport) as worker:
        stalls, ends = worker.connect(), worker.connect()
        ends.socket.sendall(data)
        ends.close()
        stalls.socket.sendall(data)
        assert stalls.ended()


@BOTH
def test_who_never_confirms_is_shut_out_and_goes_on_over_grpc(transport):
    with unharmed(config=HURRIED) as (shard, model), worker_of(shard, transport) as worker:
        channel = worker.connect()
        assert channel.attach().WhichOneof("body") == "attached"
        assert channel.ended()
        payload = flat(model.layout, *gradients(model, 1))
        assert worker.stream.exchange(payload)[0].outcome == pb.OUTCOME_APPLIED


@BOTH
def test_who_confirms_after_it_went_on_over_grpc_is_shut_out(transport):
    with unharmed() as (shard, model), worker_of(shard, transport) as worker:
        channel = worker.connect()
        channel.attach()
        payload = flat(model.layout, *gradients(model, 1))
        worker.stream.exchange(payload)
        channel.send(confirm=pb.Confirm())
        assert channel.ended()
        assert worker.stream.exchange(payload)[0].outcome == pb.OUTCOME_APPLIED


@BOTH
def test_who_confirms_after_its_stream_has_ended_is_shut_out(transport):
    with unharmed() as (shard, _):
        tasks = shard.loop.run(_tasks())
        with worker_of(shard, transport) as worker:
            channel = worker.connect()
            channel.attach()
            worker.stream.cancel()
            wait_until(lambda: shard.loop.run(_tasks()) <= tasks + 1)  # all that waits is for Confirm
            channel.send(confirm=pb.Confirm())
            assert channel.ended()


async def _tasks() -> int:
    return len(asyncio.all_tasks())


def test_of_two_channels_the_first_that_confirms_is_the_stream():
    with unharmed() as (shard, _):
        stream = StubStream(shard, transports=[SHM, BULK, SHM, 77])
        assert [offered.transport for offered in stream.opened.side_channels] == [SHM, BULK]
        first, second = (Channel(shard, offered) for offered in stream.opened.side_channels)
        for channel in (first, second):
            assert channel.attach().WhichOneof("body") == "attached"
        first.send(confirm=pb.Confirm())
        first.send(push=header(skipped=True))
        assert first.receive().result.outcome == pb.OUTCOME_SKIPPED
        second.send(confirm=pb.Confirm())
        assert second.ended()
        for channel in (first, second):
            channel.close()
        stream.cancel()


@pytest.mark.parametrize(("asked", "given"), [(0, 1), (1, 1), (2, 2), (9, 2), ((1 << 32) - 1, 2)])
def test_a_worker_gets_the_gradient_segments_it_asks_for_up_to_two(asked, given):
    with unharmed() as (shard, model), worker_of(shard, SHM) as worker:
        channel = worker.connect()
        attached = channel.attach(segments=asked).attached
        assert attached.segment_bytes == model.layout.region_bytes
        assert len(channel.descriptors) == given


def test_without_shared_memory_the_worker_is_told_that_it_goes_on_over_tcp(monkeypatch):
    with unharmed() as (shard, _), worker_of(shard, SHM) as worker:
        monkeypatch.setattr("ps_protocol.segments.Segment.create", _no_memory)
        channel = worker.connect()
        assert "not enough shared memory" in str(from_detail(channel.attach().refused))
        assert channel.ended()
        monkeypatch.undo()


def _no_memory(size_bytes: int) -> None:
    raise OSError("no room")


# Once confirmed

BAD_MESSAGES = {
    "a chunk": ({"chunk": pb.Chunk(payload=b"x")}, "a chunk came on a side channel"),
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
    with unharmed(config=HURRIED) as (shard, _), worker_of(shard, transport) as worker:
        channel = worker.confirmed()
        channel.socket.sendall(data)
        assert channel.ended()
        assert list(worker.stream.replies) == []


@BOTH
@pytest.mark.parametrize("end", ["closes", "resets", "stalls"])
@pytest.mark.parametrize("shapes", [((40, 600),), LARGE], ids=["on the loop", "in a thread"])
def test_a_push_that_breaks_off_in_its_payload_is_nothing_and_its_memory_is_free_again(transport, end, shapes):
    config = HURRIED if end == "stalls" else None
    with unharmed(*shapes, config=config) as (shard, model), worker_of(shard, transport) as worker:
        channel = worker.confirmed()
        before = model.tracker.version
        channel.send(push=header())
        channel.socket.sendall(bytes(70_000))
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
    with unharmed(*FAR_TOO_LARGE, config=HURRIED) as (shard, model), worker_of(shard, BULK) as worker:
        channel = worker.confirmed()
        channel.send(push=header(skipped=True))
        assert channel.receive().result.payload_bytes == model.layout.region_bytes
        assert list(worker.stream.replies) == []


def test_who_reads_no_answers_is_dropped_once_they_fill_its_socket():
    with unharmed(config=HURRIED) as (shard, _), worker_of(shard, SHM) as worker:
        channel = worker.confirmed()
        with suppress(ConnectionError, TimeoutError):
            for number in range(1, 20_000):
                channel.send(push=header(sequence=number, clock=number, skipped=True, push_only=True))
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


def test_a_descriptor_waits_for_room_in_the_socket_as_every_message_does():
    layout = Layout.of(whole_map(simple_spec(*LARGE)), 0)

    async def lend() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        carrier = SocketCarrier(ours, stall_seconds=10)
        region = Region(layout)
        await carrier.share([region])
        theirs.recv(1 << 10)
        filled = 0
        with suppress(BlockingIOError):
            while True:
                filled += ours.send(b"x" * 1000, socket.MSG_DONTWAIT)
        sending = asyncio.create_task(carrier.send_parameters(pb.StepResult(), region, layout.ranges()))
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

    asyncio.run(lend())


def _drain(sock: socket.socket, size: int) -> int:
    received = 0
    while received < size:
        received += len(sock.recv(size - received))
    return received


def test_a_transfer_in_a_thread_goes_on_while_a_loop_makes_its_socket_non_blocking():
    """As uvloop does for a moment when it begins to watch one."""
    ours, theirs = socket.socketpair()
    data, received = os.urandom(4 << 20), bytearray(4 << 20)
    for sock in (ours, theirs):
        prepare(sock, 10)
        os.set_blocking(sock.fileno(), False)
    sending = threading.Thread(target=send_all, args=(ours, [data[:5], b"", memoryview(data)[5:]]))
    sending.start()
    receive_into(theirs, [memoryview(received)])
    sending.join()
    assert received == data
    ours.close()
    theirs.close()


@pytest.mark.parametrize("blocking", [True, False])
def test_a_peer_that_stalls_in_a_transfer_is_given_up(blocking):
    ours, theirs = socket.socketpair()
    prepare(ours, 0.1)
    os.set_blocking(ours.fileno(), blocking)
    with pytest.raises(ConnectionAbortedError, match="stalled"):
        send_all(ours, [bytes(4 << 20)])
    with pytest.raises(ConnectionAbortedError, match="stalled"):
        receive_into(ours, [memoryview(bytearray(1))])
    ours.close()
    theirs.close()
