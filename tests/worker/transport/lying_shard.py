"""A shard that offers one side channel and misbehaves on it as the test says."""

from __future__ import annotations

import os
import queue
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import grpc
import pytest

from ps_protocol.cluster.requests import OpenRequest
from ps_protocol.cluster.transport import Transport
from ps_protocol.errors import ERROR_TRAILER, PsError
from ps_protocol.model.layout import Layout
from ps_protocol.rpc.channel import open_channel
from ps_protocol.v1 import common_pb2
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.convert.errors import to_detail
from ps_protocol.wire.shared_memory import SharedMemory
from ps_protocol.wire.socket_messages import LENGTH, framed
from ps_worker.transport.base import ClientTransport, Link, Peer
from ps_worker.transport.negotiate import open_stream
from tests.support.shards import simple_spec, whole_map
from tests.transports.support import leaves_no_descriptors

BULK, SHM = common_pb2.TRANSPORT_BULK, common_pb2.TRANSPORT_SHM
BOTH = pytest.mark.parametrize("transport", [BULK, SHM], ids=["bulk", "shm"])

LAYOUT = Layout.of(whole_map(simple_spec((701, 513))), 0)
SIZE = LAYOUT.region_bytes

#: What a misbehaving shard does with the one connection it gets.
Script = Callable[[socket.socket], None]


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
        self._thread.join(60)
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
            connection.settimeout(60)
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
