"""A worker's stream over gRPC, against a bare server: who sends and receives when, and that signals get through."""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from ps_protocol.cluster.answers import RowsAnswer, StepAnswer
from ps_protocol.cluster.requests import LookupHeader, OpenRequest, PushHeader
from ps_protocol.errors import Unavailable
from ps_protocol.model.layout import Layout
from ps_protocol.rpc.channel import open_channel
from ps_protocol.v1 import shard_pb2 as pb
from ps_worker.transport.base import Link, Peer
from ps_worker.transport.grpc_stream import GrpcClientTransport
from tests.support.shards import simple_spec, wait_until, whole_map

_LAYOUT = Layout.of(whole_map(simple_spec((7,))), 0)


@contextmanager
def opened(answers: Callable[[Iterator[str | None]], Iterator[pb.StepReply]]) -> Iterator[GrpcClientTransport]:
    """A stream to a server that sends ``answers`` to the kinds of the requests behind the first."""

    def step(requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        next(requests)
        yield pb.StepReply(opened=pb.Opened()).SerializeToString()
        kinds = (pb.StepRequest.FromString(request).WhichOneof("body") for request in requests)
        for reply in answers(kinds):
            yield reply.SerializeToString()

    server = grpc.server(ThreadPoolExecutor(2))
    handlers = {"Step": grpc.stream_stream_rpc_method_handler(step)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("ps_protocol.v1.Shard", handlers),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with open_channel(address) as channel:
            transport = GrpcClientTransport(channel, Link(Peer(0, address), _LAYOUT, lambda _: None))
            transport.open(OpenRequest("model", 1, (0, 1), 1, 0, None))
            yield transport
            transport.close()
    finally:
        server.stop(None).wait()


def in_chunks(payload: bytes, sizes: list[int]) -> Iterator[pb.StepReply]:
    """A result with ``payload`` behind it, cut into ``sizes``."""
    yield pb.StepReply(result=pb.StepResult(outcome=pb.OUTCOME_APPLIED, payload_bytes=len(payload)))
    position = 0
    for size in sizes:
        yield pb.StepReply(chunk=pb.Chunk(position=position, payload=payload[position : position + size]))
        position += size


@pytest.mark.parametrize(
    "sizes",
    [[1 << 20, 1 << 20, 5], [1, 1, 1], [3 << 20, 1, 1 << 20, 2 << 20], [5 << 20]],
    ids=["as a shard cuts it", "single bytes", "of all sizes", "one chunk"],
)
def test_a_payload_comes_in_chunks_of_any_size_and_the_next_exchange_goes_on(sizes: list[int]) -> None:
    payload = bytes(range(251)) * (sum(sizes) // 251 + 1)
    payload = payload[: sum(sizes)]

    def answers(kinds: Iterator[str | None]) -> Iterator[pb.StepReply]:
        for kind in kinds:
            assert kind == "push"
            yield from in_chunks(payload, sizes)

    with opened(answers) as transport:
        for sequence in range(1, 4):
            found = memoryview(bytearray(len(payload)))
            transport.push(PushHeader(sequence, 0, sequence, 0), [])
            assert isinstance(transport.receive(lambda _, into=found: [into]), StepAnswer)
            assert found == payload


def test_a_push_goes_out_while_rows_asked_for_before_wait_for_it() -> None:
    def answers(kinds: Iterator[str | None]) -> Iterator[pb.StepReply]:
        assert [next(kinds), next(kinds), next(kinds)] == ["lookup", "lookup", "push"]
        yield pb.StepReply(rows=pb.Rows(number=1))
        yield pb.StepReply(rows=pb.Rows(number=2))
        yield pb.StepReply(result=pb.StepResult(outcome=pb.OUTCOME_APPLIED))
        next(kinds, None)

    with opened(answers) as transport:
        transport.look_up(LookupHeader(1, (), None), [])
        transport.look_up(LookupHeader(2, (), None), [])
        transport.push(PushHeader(1, 0, 1, 0), [])
        found = [transport.receive(lambda _: []) for _ in range(3)]
        assert [type(each) for each in found] == [RowsAnswer, RowsAnswer, StepAnswer]


def test_what_was_sent_before_the_end_is_received_and_the_end_stays_the_end() -> None:
    def answers(kinds: Iterator[str | None]) -> Iterator[pb.StepReply]:
        next(kinds)
        yield pb.StepReply(result=pb.StepResult(outcome=pb.OUTCOME_APPLIED))

    with opened(answers) as transport:
        transport.push(PushHeader(1, 0, 1, 0), [])
        assert isinstance(transport.receive(lambda _: []), StepAnswer)
        wait_until(lambda: not transport.alive)
        for _ in range(2):
            with pytest.raises(Unavailable, match="closed the stream"):
                transport.receive(lambda _: [])


def test_a_stream_takes_one_thread_of_grpc_and_that_ends_with_it() -> None:
    def of_streams() -> int:
        frames = sys._current_frames().values()
        return sum(frame.f_code.co_name == "_requests" for frame in frames)

    before = set(threading.enumerate())
    with opened(lambda kinds: iter(list(kinds)[:0])) as transport:
        wait_until(lambda: of_streams() == 1)
        assert not [each for each in set(threading.enumerate()) - before if each.name == "incoming"]
        transport.close()
        wait_until(lambda: of_streams() == 0)


class SignalledWithin:
    """``inner``, in each of whose methods, once it is ``armed``, Ctrl-C comes; ``done`` are those that went on."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.armed, self.done = inner, False, list[str]()

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.within(name, lambda: getattr(self.inner, name)(*arguments))

    def __call__(self, *arguments: Any) -> Any:
        return self.within("begin", lambda: self.inner(*arguments))

    def within(self, name: str, call: Callable[[], Any]) -> Any:
        if self.armed:
            _thread.interrupt_main()
        result = call()
        self.done.append(name)
        return result


def test_a_signal_does_not_come_between_when_a_call_is_ended_or_is_asked_for_its_error() -> None:
    def nothing(kinds: Iterator[str | None]) -> Iterator[pb.StepReply]:
        for _ in kinds:
            yield pb.StepReply()

    with opened(nothing) as transport:
        held: Any = transport
        held._call = call = SignalledWithin(held._call)
        call.armed = True
        asks: dict[str, Callable[[], object]] = {
            "add_callback": lambda: transport.on_end(threading.Event().set),
            "cancel": transport.cancel,
            "code": transport.reason,
        }
        for name, ask in asks.items():
            with pytest.raises(KeyboardInterrupt):
                ask()
            wait_until(lambda name=name: name in call.done)  # type: ignore[misc]
        call.armed = False


def test_a_signal_does_not_come_between_when_a_call_begins() -> None:
    begins = SignalledWithin(lambda _: SignalledWithin(None))
    begins.armed = True

    class Channel:
        def stream_stream(self, *_: Any, **__: Any) -> Any:
            return begins

    channel: Any = Channel()
    with pytest.raises(KeyboardInterrupt):
        GrpcClientTransport(channel, Link(Peer(0, ""), _LAYOUT, lambda _: None))
    wait_until(lambda: begins.done == ["begin"])
