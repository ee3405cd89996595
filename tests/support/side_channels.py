"""Workers made of sockets and generated classes only, for the side channels of a real shard."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import pytest

from ps_protocol.errors import PsError
from ps_protocol.v1 import common_pb2
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.socket_messages import LENGTH, framed
from ps_server.shard.config import SideChannelConfig
from ps_server.shard.step.model import ShardModel
from tests.support.shards import (
    StubStream,
    TestShard,
    error_of,
    wait_until,
)
from tests.transports.support import begin, leaves_no_descriptors, running_shard

BULK, SHM = common_pb2.TRANSPORT_BULK, common_pb2.TRANSPORT_SHM
BOTH = pytest.mark.parametrize("transport", [BULK, SHM], ids=["bulk", "shm"])
HURRIED = SideChannelConfig(stall_seconds=0.2, token_seconds=0.2)
#: For workers that show their token in time, also on a busy machine, and stall afterwards.
STALLED_SOON = SideChannelConfig(stall_seconds=0.2, token_seconds=60.0)

SMALL = ((4, 3), (5,))
LARGE = ((701, 513), (3,))
FAR_TOO_LARGE = ((6 << 20,),)


class Channel:
    """One connection to a side channel."""

    def __init__(self, shard: TestShard, offered: pb.SideChannel) -> None:
        self.token = offered.token
        self.descriptors: list[int] = []
        if offered.transport == SHM:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.socket.connect(offered.name)
        else:
            self.socket = socket.create_connection((shard.address.rpartition(":")[0], offered.port))
        self.socket.settimeout(60)

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
