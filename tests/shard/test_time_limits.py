"""A client that neither reads nor writes holds nothing of a shard for longer than a limit."""

from __future__ import annotations

import math
import queue
import socket
from functools import partial

import grpc
import pytest

from ps_protocol.errors import Fenced, InvalidRequest, PsError, Unavailable
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.convert.options import options_to_pb
from ps_server.limits import ServerLimits, ShardLimits
from ps_server.serving import grpc_server
from ps_server.shard.config import SideChannelConfig
from ps_server.shard.transport import grpc_stream
from tests.support.loops import LoopThread
from tests.support.shards import (
    StubStream,
    coordinator_stub,
    error_of,
    flat,
    gradients,
    load,
    refused_as,
    running_shard,
    start,
    wait_until,
    writer,
)
from tests.support.side_channels import BULK, Worker

SERVICE = "/ps_protocol.v1.Shard/"
LARGE = ((3 << 20,),)
"""More than gRPC takes for a client that does not read."""


def error_at_the_end(replies) -> PsError:
    with pytest.raises(grpc.RpcError) as refused:
        for _ in replies:
            pass
    return error_of(refused.value)


@pytest.fixture
def hurry(monkeypatch):
    """Called where clients have said all they had to in time: from then on limits are a fraction of a second."""

    def limits() -> None:
        monkeypatch.setattr(grpc_stream.read_soon, "__defaults__", (0.2,))
        monkeypatch.setattr(grpc_stream.write, "__defaults__", (0.2,))
        monkeypatch.setattr(grpc_stream.GrpcServerTransport.__init__, "__defaults__", (0.2,))

    return limits


@pytest.mark.parametrize(
    ("method", "request_of"),
    [("Save", pb.SaveRequest), ("Pull", pb.PullRequest)],
)
def test_what_nobody_reads_is_given_up(hurry, method, request_of):
    with running_shard() as shard:
        model, _ = start(shard, *LARGE)
        hurry()
        replies = shard.channel.unary_stream(SERVICE + method)(request_of(model="model").SerializeToString())
        newest = shard.take(model)
        newest[1]()
        next(replies)
        published = newest[0]
        wait_until(lambda: published.takers == 0)
        error = error_at_the_end(replies)
        assert isinstance(error, Unavailable)
        assert error.remedy


class Sender:
    """A call whose messages come when the test says so."""

    def __init__(self, shard, method, *messages) -> None:
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        for message in messages:
            self._queue.put(message.SerializeToString())
        streams = method in ("Step", "Follow")
        requests = iter(self._queue.get, None)
        path = SERVICE + method
        self.replies = (
            shard.channel.stream_stream(path)(requests)
            if streams
            else shard.channel.stream_unary(path).future(requests)
        )
        # gRPC's thread waits for requests until then.
        end = partial(self._queue.put, None)
        self.replies.add_callback(end) if streams else self.replies.add_done_callback(lambda _: end())

    def error(self) -> PsError:
        with pytest.raises(grpc.RpcError) as refused:
            self.replies.result() if hasattr(self.replies, "result") else list(self.replies)
        return error_of(refused.value)


def header(shard, method):
    if method == "Load":
        return pb.LoadRequest(header=pb.LoadHeader(model="model", worker=writer(shard), with_region=True))
    return pb.LoadRowsRequest(header=pb.LoadRowsHeader(model="model", worker=writer(shard), rows=1))


@pytest.mark.parametrize("method", ["Step", "Load", "LoadRows"])
def test_a_call_that_says_nothing_is_given_up(hurry, method):
    limits = ShardLimits()
    with running_shard(limits=limits) as shard:
        start(shard)
        hurry()
        # Not from the start: calls of the start would be given up on a busy machine.
        object.__setattr__(limits, "first_message_seconds", 0.2)
        assert isinstance(Sender(shard, method).error(), Unavailable)


def test_a_load_that_stops_half_way_is_given_up_and_changes_nothing(hurry):
    with running_shard() as shard:
        model, _ = start(shard)
        hurry()
        call = Sender(shard, "Load", header(shard, "Load"), pb.LoadRequest(chunk=pb.Chunk(payload=bytes(4))))
        assert isinstance(call.error(), Unavailable)
        assert model.loads == 1
        wait_until(lambda: model.pool.in_use == 0)


def test_a_push_that_stops_half_way_over_grpc_ends_its_stream_and_keeps_no_memory(monkeypatch):
    made, make = [], grpc_stream.GrpcServerTransport.__init__

    def noted(transport, *arguments):
        made.append(transport)
        make(transport, *arguments)

    monkeypatch.setattr(grpc_stream.GrpcServerTransport, "__init__", noted)
    with running_shard() as shard:
        model, _ = start(shard)
        stream = StubStream(shard)
        # Not before: on a busy machine the answer to Open would take too long.
        made[-1]._stall_seconds = 0.2
        stream.send(push=pb.PushHeader(sequence=1, clock=1))
        stream.send(chunk=pb.Chunk(payload=bytes(4)))
        for _ in stream.replies:
            pass
        wait_until(lambda: model.pool.in_use == 0)
        assert model.tracker.version == 0


@pytest.mark.parametrize("seconds", [1e12, math.inf, -math.inf, math.nan, -1.0])
def test_a_shard_holds_still_for_a_time_that_ends(seconds):
    with running_shard() as shard:
        model, _ = start(shard)
        stub = coordinator_stub(shard.channel, 100)
        with refused_as(InvalidRequest):
            stub.Pause(pb.PauseRequest(quiesce="cut", seconds=seconds))
        stub.Pause(pb.PauseRequest(quiesce="cut", seconds=60))
        with refused_as(InvalidRequest):
            stub.CatchUp(pb.CatchUpRequest(quiesce="cut", seconds=seconds))
        stub.Resume(pb.ResumeRequest(quiesce="cut"))
        assert not model.gate.paused


# -- one stream of each worker


def test_a_newer_stream_of_a_worker_ends_the_older_and_frees_its_memory():
    with running_shard() as shard:
        model, _ = start(shard)
        streams = []
        for _ in range(5):
            streams.append(StubStream(shard))
            streams[-1].send(stage=pb.Stage(begin=0, end=8, payload=bytes(8)))
        wait_until(lambda: model.pool.in_use == 1)
        for older in streams[:-1]:
            error = error_at_the_end(older.replies)
            assert isinstance(error, Unavailable)
            assert "another call" in str(error)
        payload = flat(model.layout, *gradients(model, 1))
        assert streams[-1].exchange(payload)[0].version == 1
        streams[-1].end()
        wait_until(lambda: model.pool.in_use == 0)


def test_streams_of_a_worker_that_is_no_member_any_more_end():
    with running_shard({0: 1, 1: 2}) as shard:
        model, _ = start(shard)
        gone, stays = StubStream(shard), StubStream(shard, rank=1, incarnation=2)
        gone.send(stage=pb.Stage(begin=0, end=8, payload=bytes(8)))
        wait_until(lambda: model.pool.in_use == 1)
        shard.set_view({1: 2})
        assert isinstance(error_at_the_end(gone.replies), Fenced)
        wait_until(lambda: model.pool.in_use == 0)
        assert stays.exchange(flat(model.layout, *gradients(model, 1)))[0].version == 1
        stays.end()


def test_a_newer_load_of_a_worker_ends_the_older():
    with running_shard() as shard:
        model, _ = start(shard)
        older = Sender(shard, "Load", header(shard, "Load"))
        wait_until(lambda: model.pool.in_use == 1)
        assert load(shard, model, bytes(model.layout.region_bytes)).written
        assert isinstance(older.error(), Unavailable)
        wait_until(lambda: model.pool.in_use == 0)


# -- connections


def test_a_connection_that_says_nothing_is_closed():
    with LoopThread() as loop:
        server = loop.run(grpc_server.start("127.0.0.1", 0, [], limits=ServerLimits(handshake_seconds=0.2)))
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.settimeout(60)
            while stranger.recv(1 << 10):  # its settings; then the end
                pass
        loop.run(server.stop(0))


def test_strangers_do_not_lock_newcomers_out_of_side_channels():
    with running_shard() as shard:
        start(shard)
        worker = Worker(shard, BULK)
        host, port = shard.address.rpartition(":")[0], worker.offered.port
        strangers = [socket.create_connection((host, port)) for _ in range(SideChannelConfig().max_handshakes + 10)]
        for stranger in strangers[:10]:
            stranger.settimeout(60)
            assert stranger.recv(1) == b""
        worker.confirmed()
        worker.close()
        for stranger in strangers:
            stranger.close()


def test_a_stranger_may_send_128_bytes_and_no_more():
    with running_shard() as shard:
        model, _ = start(shard)
        worker = Worker(shard, BULK)
        host, port = shard.address.rpartition(":")[0], worker.offered.port
        with socket.create_connection((host, port)) as stranger:
            stranger.settimeout(60)
            stranger.sendall((129).to_bytes(4, "little"))
            said = stranger.recv(1 << 10)
            assert b"too long" in said
            while stranger.recv(1 << 10):
                pass
        channel = worker.confirmed()
        stage = pb.Stage(begin=0, end=8, payload=bytes(8))
        channel.send(stage=stage)  # longer messages are for those who have shown theirs
        rest = bytes(model.layout.region_bytes - 8)
        channel.send(push=pb.PushHeader(sequence=1, clock=1, staged=[0, 8], payload=rest, groups=[options_to_pb({})]))
        assert channel.receive().result.sequence == 1
        worker.close()
