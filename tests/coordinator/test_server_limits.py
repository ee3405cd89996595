"""What clients may take of a server: too much is refused with a typed error, counted, and costs the others nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ps_protocol.errors import PsError, Unavailable
from ps_protocol.rpc.channel import open_channel
from ps_protocol.rpc.client_errors import translate
from ps_server.limits import CALLS, LIMITS, PEER_CALLS, LimitCounts, ServerLimits, SharedLimit, host_of
from ps_server.serving import grpc_server
from ps_server.serving.metrics import REFUSALS, read_limits
from tests.support.loops import LoopThread
from tests.support.shards import wait_until

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Waiting(grpc.GenericRpcHandler):
    """Calls of every kind, which end when ``go`` is set; an error in one of them is its own."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.begun = 0

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        kind = details.method.rpartition("/")[2]

        async def once(_: Any, context: Any) -> bytes:
            self.begun += 1
            await self.go.wait()
            if kind == "fails":
                raise KeyError("a defect")
            return b"done"

        async def each(_: Any, context: Any) -> AsyncIterator[bytes]:
            yield await once(_, context)

        if kind == "fails":
            return grpc.unary_unary_rpc_method_handler(once)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(each if kind.endswith("_stream") else once)


class Server:
    """One with these limits."""

    def __init__(self, loop: LoopThread, limits: ServerLimits) -> None:
        self.counts = LimitCounts()
        self.loop = loop
        self.handler: Waiting
        self.running = loop.run(self._start(limits))
        self.address = self.running.address

    async def _start(self, limits: ServerLimits) -> grpc_server.RunningServer:
        self.handler = Waiting()
        services = [("test.Waiting", lambda server: server.add_generic_rpc_handlers((self.handler,)))]
        return await grpc_server.start("127.0.0.1", 0, services, limits=limits, limit_counts=self.counts)

    def release(self) -> None:
        self.loop.loop.call_soon_threadsafe(self.handler.go.set)


@contextmanager
def serving(limits: ServerLimits) -> Iterator[Server]:
    with LoopThread() as loop:
        server = Server(loop, limits)
        try:
            yield server
        finally:
            loop.run(server.running.stop(0))


class Begun:
    """One call in progress."""

    def __init__(self, channel: grpc.Channel, kind: str) -> None:
        path = f"/test.Waiting/{kind}"
        self._streams = kind.endswith("_stream")
        self.future: Any
        match kind:
            case "unary_unary" | "fails":
                self.future = channel.unary_unary(path).future(b"x", timeout=60)
            case "stream_unary":
                self.future = channel.stream_unary(path).future(iter([b"x"]), timeout=60)
            case "unary_stream":
                self.future = channel.unary_stream(path)(b"x", timeout=60)
            case _:
                self.future = channel.stream_stream(path)(iter([b"x"]), timeout=60)

    def answer(self) -> bytes:
        return next(self.future) if self._streams else self.future.result()


def refused(begun: Begun) -> PsError:
    with pytest.raises(grpc.RpcError) as error:
        begun.answer()
    return translate(error.value, "the test server")


@pytest.mark.parametrize("kind", KINDS)
def test_one_call_too_many_is_refused_and_the_others_end_well(kind):
    with serving(ServerLimits(max_calls=2)) as server, open_channel(server.address) as channel:
        held = [Begun(channel, kind) for _ in range(2)]
        wait_until(lambda: server.handler.begun == 2)
        error = refused(Begun(channel, kind))
        assert isinstance(error, Unavailable)
        assert "calls in progress" in error.message
        assert error.expected == "at most 2"
        assert "--max-calls" in error.remedy
        assert server.counts.counts[CALLS] == 1
        server.release()
        assert [each.answer() for each in held] == [b"done"] * 2
        # What has ended makes room; a stream ends behind its last message.
        wait_until(lambda: server.counts.usage[CALLS] == (2, 0))
        assert Begun(channel, kind).answer() == b"done"


def test_one_host_gets_its_share_and_no_more():
    counts = LimitCounts()
    share = SharedLimit(3, 2, (CALLS, PEER_CALLS), counts)
    for _ in range(2):
        share.take("a", "calls", ("--all", "--one"))
    with pytest.raises(Unavailable, match=r"of one host.*--one"):
        share.take("a", "calls", ("--all", "--one"))
    share.take("b", "calls", ("--all", "--one"))
    with pytest.raises(Unavailable, match="--all"):
        share.take("c", "calls", ("--all", "--one"))
    share.give_back("a")
    share.take("c", "calls", ("--all", "--one"))
    assert dict(counts.counts) == {**dict.fromkeys(LIMITS, 0), CALLS: 1, PEER_CALLS: 1}
    assert share.used == 3


def test_the_metric_has_a_sample_of_every_limit():
    counts = LimitCounts()
    counts.add(PEER_CALLS)
    found = {each.labels: each.value for each in read_limits(counts) if each.metric is REFUSALS}
    assert found == {(limit,): int(limit == PEER_CALLS) for limit in LIMITS}


@pytest.mark.parametrize(
    ("peer", "host"),
    [("ipv4:10.0.0.1:4711", "ipv4:10.0.0.1"), ("ipv6:%5B::1%5D:7", "ipv6:%5B::1%5D"), ("unix", "unix")],
)
def test_all_connections_of_a_host_are_one_peer(peer, host):
    assert host_of(peer) == host


def test_calls_of_two_connections_of_one_host_count_together():
    with serving(ServerLimits(max_peer_calls=1)) as server, ExitStack() as stack:
        one, other = (stack.enter_context(open_channel(server.address)) for _ in range(2))
        held = Begun(one, "unary_unary")
        wait_until(lambda: server.handler.begun == 1)
        assert "--max-peer-calls" in refused(Begun(other, "unary_unary")).remedy
        assert server.counts.counts[PEER_CALLS] == 1
        server.release()
        assert held.answer() == b"done"


@pytest.mark.parametrize("end", ["fails", "cancelled"])
def test_a_call_that_does_not_end_well_makes_room_too(end):
    with serving(ServerLimits(max_calls=1)) as server, open_channel(server.address) as channel:
        held = Begun(channel, "fails" if end == "fails" else "stream_stream")
        wait_until(lambda: server.handler.begun == 1)
        if end == "fails":
            server.release()
            with pytest.raises(grpc.RpcError):
                held.answer()
        else:
            held.future.cancel()
            server.release()

        def works() -> bool:
            try:
                return Begun(channel, "unary_unary").answer() == b"done"
            except grpc.RpcError:
                return False

        wait_until(works)


def test_a_full_server_still_is_healthy():
    with serving(ServerLimits(max_calls=1)) as server, open_channel(server.address) as channel:
        held = Begun(channel, "unary_unary")
        wait_until(lambda: server.handler.begun == 1)
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        server.release()
        held.answer()


def test_a_call_beyond_the_streams_of_a_connection_waits_for_its_turn():
    with serving(ServerLimits(max_streams=1)) as server, open_channel(server.address) as channel:
        held = [Begun(channel, "unary_unary") for _ in range(3)]
        wait_until(lambda: server.handler.begun == 1)
        server.release()
        assert [each.answer() for each in held] == [b"done"] * 3


def _alone(address: str) -> grpc.Channel:
    """A channel with a connection of its own."""
    return grpc.insecure_channel(address, (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)))


def test_one_connection_too_many_is_closed_and_the_others_go_on():
    with serving(ServerLimits(max_connections=2)) as server, ExitStack() as stack:
        first, second, third = (stack.enter_context(_alone(server.address)) for _ in range(3))
        held = [Begun(first, "unary_unary"), Begun(second, "unary_unary")]
        wait_until(lambda: server.handler.begun == 2)
        assert isinstance(refused(Begun(third, "unary_unary")), Unavailable)
        server.release()
        assert [each.answer() for each in held] == [b"done"] * 2


def test_headers_above_the_limit_are_refused_unread():
    with serving(ServerLimits(max_metadata_bytes=4096)) as server, open_channel(server.address) as channel:
        server.release()
        method = channel.unary_unary("/test.Waiting/unary_unary")
        assert method(b"", timeout=30, metadata=(("x", "y" * 2000),)) == b"done"
        for size, refusal in ((5000, grpc.StatusCode.INVALID_ARGUMENT), (20_000, grpc.StatusCode.RESOURCE_EXHAUSTED)):
            with pytest.raises(grpc.RpcError) as error:
                method(b"", timeout=30, metadata=(("x", "y" * size),))
            assert error.value.code() is refusal
        assert server.handler.begun == 1
