"""Which thread sends what a socket does not take at once. A thread as the shard; costs a second."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace

import pytest

from ps_protocol.cluster.requests import PushHeader
from ps_protocol.model.layout import Layout
from ps_protocol.wire.carrier import PlainCarrier
from ps_protocol.wire.socket_messages import prepare
from tests.support.shards import simple_spec, whole_map
from tests.worker.transport import lying_shard
from tests.worker.transport.lying_shard import BULK, Script, attached, hear, opened, result, sends

LARGE = memoryview(bytes(24 << 20))
"""More than the buffers of a socket hold whose other end does not read: 4 MB there, 6 MB here."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the short limit of the tests beside this one."""
    monkeypatch.setattr(PlainCarrier, "prepare", lambda self, seconds=60.0: prepare(self.socket, 60.0))


def takes(*kinds: str) -> Script:
    """Hear these messages; a push with its large payload."""

    def script(sock: socket.socket) -> None:
        for kind in kinds:
            assert hear(sock).WhichOneof("body") == kind
            left = len(LARGE) if kind == "push" else 0
            while left:
                left -= len(sock.recv(min(left, 1 << 20)))

    return script


def steps(*each: Script) -> Script:
    def script(sock: socket.socket) -> None:
        attached(sock)
        for step in each:
            step(sock)

    return script


def until(go: threading.Event) -> Script:
    def script(_: socket.socket) -> None:
        assert go.wait(60)

    return script


def test_a_push_to_the_only_shard_has_been_sent_when_it_returns():
    with opened(BULK, steps(*[takes("push"), sends(result(sequence=1))] * 2)) as (stream, _):
        for number in (1, 2):
            stream.push(PushHeader(sequence=number), [LARGE])
            assert stream._sending is None  # type: ignore[attr-defined]
            stream.receive(lambda _: [])
        del stream


def test_a_push_behind_a_question_does_not_wait_for_the_shard_to_read():
    go = threading.Event()
    with opened(BULK, steps(until(go), takes("fetch", "push"), sends(result() * 2))) as (stream, _):
        stream.fetch()
        stream.push(PushHeader(sequence=1), [LARGE])
        assert not stream._sending.done()  # type: ignore[attr-defined]
        go.set()
        for _ in range(2):
            stream.receive(lambda _: [])
        stream._sending.result(60)  # type: ignore[attr-defined]
        del stream


def test_a_push_to_one_of_several_shards_does_not_wait_for_it_to_read(monkeypatch):
    one = whole_map(simple_spec())
    two = replace(one, shards=2, slices=(one.slices[0], replace(one.slices[1], shard=1)))
    monkeypatch.setattr(lying_shard, "LAYOUT", Layout.of(two, 0))
    go = threading.Event()
    with opened(BULK, steps(until(go), takes("push"), sends(result()))) as (stream, _):
        stream.push(PushHeader(sequence=1), [LARGE])
        assert not stream._sending.done()  # type: ignore[attr-defined]
        go.set()
        stream.receive(lambda _: [])
        stream._sending.result(60)  # type: ignore[attr-defined]
        del stream
