"""A worker's transports with a shard that misbehaves, stalls or vanishes: another transport, or a typed error."""

from __future__ import annotations

import os
import queue
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest

from ps_protocol.cluster.answers import StepAnswer
from ps_protocol.cluster.requests import OpenRequest, PushHeader
from ps_protocol.cluster.transport import Transport
from ps_protocol.errors import ERROR_TRAILER, Fenced, InternalError, InvalidRequest, PsError, Unavailable
from ps_protocol.model.layout import Layout
from ps_protocol.rpc.channel import open_channel
from ps_protocol.v1 import common_pb2
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire import socket_messages
from ps_protocol.wire.carrier import PlainCarrier
from ps_protocol.wire.convert.errors import to_detail
from ps_protocol.wire.frames import pieces_of
from ps_protocol.wire.shared_memory import SharedMemory
from ps_protocol.wire.socket_messages import LENGTH, MAX_MESSAGE_BYTES, framed, prepare
from ps_worker.transport import grpc_stream, negotiate
from ps_worker.transport.base import ClientTransport, Link
from ps_worker.transport.negotiate import open_stream
from ps_worker.transport.replies import Peer
from tests.support.shards import simple_spec, whole_map
from tests.transports.support import leaves_no_descriptors

BULK, SHM = common_pb2.TRANSPORT_BULK, common_pb2.TRANSPORT_SHM
BOTH = pytest.mark.parametrize("transport", [BULK, SHM], ids=["bulk", "shm"])

LAYOUT = Layout.of(whole_map(simple_spec((701, 513))), 0)
SIZE = LAYOUT.region_bytes

#: What a misbehaving shard does with the one connection it gets.
Script = Callable[[socket.socket], None]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(negotiate, "CONNECT_SECONDS", 0.3)
    monkeypatch.setattr(grpc_stream, "_END_SECONDS", 0.1)
    monkeypatch.setattr(PlainCarrier, "prepare", lambda self, seconds=0.3: prepare(self.socket, seconds))


class LyingShard:
    """A gRPC server that offers one side channel, and a thread that does with it as the test says."""

    def __init__(self, transport: int, script: Script) -> None:
        self.ends: queue.SimpleQueue[PsError | None] = queue.SimpleQueue()
        self._folder = tempfile.TemporaryDirectory()
        if transport == SHM:
            self._listener = socket.socket(socket.AF_UNIX)
            name = f"{self._folder.name}/socket"
            self._listener.bind(name)
            self._offered = pb.SideChannel(transport=SHM, name=name, token=b"token")
            self._listener.listen()
        else:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self._offered = pb.SideChannel(transport=BULK, port=self._listener.getsockname()[1], token=b"token")
        self._server = grpc.server(ThreadPoolExecutor(2))
        step = grpc.stream_stream_rpc_method_handler(self._step)
        handler = grpc.method_handlers_generic_handler("ps_protocol.v1.Shard", {"Step": step})
        self._server.add_generic_rpc_handlers((handler,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        self._thread = threading.Thread(target=self._lie, args=(script,))
        self._thread.start()

    def close(self) -> None:
        self.ends.put(None)
        self._listener.close()
        self._thread.join(10)
        self._server.stop(None).wait()
        self._folder.cleanup()

    def _step(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        next(requests)
        yield pb.StepReply(opened=pb.Opened(side_channels=[self._offered])).SerializeToString()
        if self._offered.transport == BULK and self._offered.token == b"":
            return
        pushes = threading.Thread(target=self._read, args=(requests,), daemon=True)
        pushes.start()
        error = self.ends.get()
        if error is not None:
            context.set_trailing_metadata(((ERROR_TRAILER, to_detail(error).SerializeToString()),))
            context.abort(grpc.StatusCode.ABORTED, error.message)
        yield pb.StepReply(result=pb.StepResult(sequence=1, outcome=pb.OUTCOME_SKIPPED)).SerializeToString()

    def _read(self, requests: Iterator[bytes]) -> None:
        with suppress(grpc.RpcError):
            for _ in requests:
                self.ends.put(None)

    def _lie(self, script: Script) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            connection.settimeout(10)
            with connection:
                script(connection)


@contextmanager
def opened(transport: int, script: Script) -> Iterator[tuple[ClientTransport, LyingShard]]:
    """What a worker gets from a misbehaving shard; everything is closed at the end, also what the worker opened."""
    with leaves_no_descriptors():
        shard = LyingShard(transport, script)
        channel = open_channel(shard.address)
        try:
            link = Link(Peer(0, shard.address), LAYOUT, lambda _: None)
            wanted = OpenRequest(transports=[Transport.SHM if transport == SHM else Transport.BULK])
            _, stream = open_stream(channel, link, wanted)
            try:
                yield stream, shard
            finally:
                stream.close()
        finally:
            channel.close()
            shard.close()
            stream = link = None  # type: ignore[assignment]


def say(sock: socket.socket, *descriptors: int, **body: object) -> None:
    data = framed(pb.StepReply(**body).SerializeToString())
    if descriptors:
        socket.send_fds(sock, [data], descriptors)
    else:
        sock.sendall(data)


def hear(sock: socket.socket) -> pb.StepRequest:
    head = sock.recv(LENGTH.size, socket.MSG_WAITALL)
    if not head:
        raise ConnectionResetError("the worker hung up")
    (length,) = LENGTH.unpack(head)
    return pb.StepRequest.FromString(sock.recv(length, socket.MSG_WAITALL))


def memfd(size_bytes: int) -> int:
    fd = os.memfd_create("torch-ps-test")
    os.truncate(fd, size_bytes)
    return fd


def handing(*fds: int) -> Script:
    """Answer Attach with these descriptors."""

    def script(sock: socket.socket) -> None:
        try:
            hear(sock)
            say(sock, *fds, attached=pb.Attached(segment_bytes=SIZE))
        finally:
            for fd in fds:
                os.close(fd)
        sock.recv(1)

    return script


def answering(data: bytes, *, stay: bool = False) -> Script:
    """Answer Attach with these bytes; then close, or wait for the worker to do so."""

    def script(sock: socket.socket) -> None:
        hear(sock)
        sock.sendall(data)
        if stay:
            sock.recv(1)

    return script


def reply(**body: object) -> bytes:
    return framed(pb.StepReply(**body).SerializeToString())


# While the side channel is being opened: gRPC goes on

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
    assert stream.receive(lambda _: []).outcome == "SKIPPED"


@BOTH
@pytest.mark.parametrize("script", REFUSALS.values(), ids=REFUSALS)
def test_a_side_channel_that_does_not_open_as_agreed_is_left_alone(transport, script):
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


# Once it is open: a typed error, and the stream has ended


def attached(sock: socket.socket) -> None:
    """Take the worker in as agreed."""
    hear(sock)
    if sock.family == socket.AF_UNIX:
        segment = SharedMemory.create(SIZE)
        say(sock, segment.fd, attached=pb.Attached(segment_bytes=SIZE))
    else:
        say(sock, attached=pb.Attached())
    assert hear(sock).WhichOneof("body") == "confirm"


def then(*steps: Script) -> Script:
    """Take the worker in, take a push, then do the rest."""

    def script(sock: socket.socket) -> None:
        attached(sock)
        hear(sock)
        for step in steps:
            step(sock)

    return script


def sends(data: bytes) -> Script:
    return lambda sock: sock.sendall(data)


def stays(sock: socket.socket) -> None:
    sock.recv(1)


def shows(size_bytes: int | None, **fields: int) -> Script:
    """A result that names memory, with a segment of this size or with none."""

    def script(sock: socket.socket) -> None:
        fds = [] if size_bytes is None else [memfd(size_bytes)]
        say(sock, *fds, result=pb.StepResult(**({"payload_bytes": SIZE, "segment": 1} | fields)))
        for fd in fds:
            os.close(fd)

    return script


def result(**fields: object) -> bytes:
    return reply(result=pb.StepResult(**fields))


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
            say(sock, fd, result=pb.StepResult(sequence=number, payload_bytes=SIZE, segment=number))
            os.close(fd)
            assert hear(sock).WhichOneof("body") == "release"
        say(sock, result=pb.StepResult(sequence=3, payload_bytes=SIZE, segment=1))
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
    original = socket_messages.receive_head

    def receive_head(sock, alive):
        def still_alive() -> bool:
            asked.append(alive())
            if len(asked) == 2:  # twice as long as what counts as a stall elsewhere
                go.set()
            return asked[-1]

        return original(sock, still_alive)

    def waits(_: socket.socket) -> None:
        go.wait(10)

    with opened(transport, then(waits, sends(result()), stays)) as (stream, _):
        memory = pushed(stream)
        monkeypatch.setattr(socket_messages, "receive_head", receive_head)
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


def test_an_error_of_another_kind_than_ours_is_not_swallowed(monkeypatch):
    """A defect must not look like a transport that cannot be had."""
    monkeypatch.setattr(SharedMemory, "attach", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError), opened(SHM, attached):
        pass
