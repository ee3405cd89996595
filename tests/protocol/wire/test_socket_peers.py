"""A socket whose other end is slow, stalls or vanishes."""

from __future__ import annotations

import os
import select
import socket
import threading
from itertools import count
from types import SimpleNamespace

import pytest

from ps_protocol.wire import socket_messages
from ps_protocol.wire.carrier import PlainCarrier
from ps_protocol.wire.socket_messages import framed, receive_into, send_all, send_now
from tests.protocol.wire.socket_pairs import Sending, both_kinds, pair, pattern, targets
from tests.support.shards import wait_until


@both_kinds
def test_a_socket_that_an_event_loop_made_non_blocking_is_waited_for_all_the_same(kind: str):
    with pair(kind=kind) as (one, other):
        for sock in (one, other):
            os.set_blocking(sock.fileno(), False)
        sending = Sending(one, [pattern(8 << 20)])
        buffers, views = targets([len(pattern(8 << 20))])
        receive_into(other, views)
        sending.join()
    assert sending.error is None
    assert buffers[0] == pattern(8 << 20)


def test_a_peer_of_a_non_blocking_socket_is_given_up_when_it_stalls():
    with pair(stall_seconds=0.05) as (one, other):
        for sock in (one, other):
            os.set_blocking(sock.fileno(), False)
        with pytest.raises(ConnectionAbortedError, match="stalled"):
            receive_into(other, [memoryview(bytearray(1))])
        with pytest.raises(ConnectionAbortedError, match="stalled"):
            send_all(one, [memoryview(bytearray(32 << 20))])


@both_kinds
def test_a_peer_that_stalls_in_the_middle_of_a_transfer_is_given_up(kind: str):
    with pair(stall_seconds=0.05, kind=kind) as (one, other):
        one.sendall(b"12345")
        assert select.select([other], [], [], 60)[0]
        buffers, views = targets([2, 8])
        with pytest.raises(ConnectionAbortedError, match="stalled"):
            receive_into(other, views)
        assert (buffers[0], buffers[1][:3]) == (b"12", b"345")


@both_kinds
def test_a_peer_that_does_not_read_is_given_up(kind: str):
    with pair(stall_seconds=0.05, kind=kind) as (one, _), pytest.raises(ConnectionAbortedError, match="stalled"):
        send_all(one, [memoryview(bytearray(32 << 20))])


def test_a_peer_that_stalls_in_the_middle_of_a_head_is_given_up():
    with pair(stall_seconds=0.05) as (one, other):
        one.sendall(b"\x01\x00")
        with pytest.raises(ConnectionAbortedError, match="stalled"):
            PlainCarrier(other).receive_message(lambda: True)


def test_a_peer_that_gives_a_little_now_and_then_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    """The limit is for nothing at all, not for the whole transfer."""
    data, looks = b"0123456789", count()
    with pair(stall_seconds=30.0) as (one, other):

        def clock() -> float:
            look = next(looks)
            if look % 2:  # It was asked what is left of the time: now there is something.
                one.sendall(data[look // 2 : look // 2 + 1])
            return 11.0 * look

        monkeypatch.setattr(socket_messages, "time", SimpleNamespace(monotonic=clock))
        os.set_blocking(other.fileno(), False)
        buffers, views = targets([len(data)])
        receive_into(other, views)
    assert buffers[0] == data
    assert clock() > 200.0


def test_between_two_messages_a_peer_takes_its_time_as_long_as_it_is_alive():
    asked: list[None] = []

    def alive() -> bool:
        asked.append(None)
        if len(asked) == 3:
            one.sendall(framed(b"late"))
        return True

    with pair(stall_seconds=0.03) as (one, other):
        assert PlainCarrier(other).receive_message(alive) == (b"late", [])
    assert len(asked) == 3


def test_a_peer_that_is_dead_between_two_messages_is_given_up():
    with pair(stall_seconds=0.03) as (_, other), pytest.raises(ConnectionAbortedError, match="gone"):
        PlainCarrier(other).receive_message(lambda: False)


@both_kinds
@pytest.mark.parametrize("sent", [0, 1, 70_000])
def test_a_peer_that_closes_in_the_middle_of_a_transfer_is_noticed(kind: str, sent: int):
    with pair(kind=kind) as (one, other):
        sending = Sending(one, [bytes(sent)])
        _, views = targets([10, 100_000])
        reading = threading.Thread(target=lambda: (sending.join(), one.close()))
        reading.start()
        with pytest.raises(ConnectionResetError, match="middle"):
            receive_into(other, views)
        reading.join()


@pytest.mark.parametrize(("sent", "text"), [(0, "closed the connection$"), (3, "middle")])
def test_a_peer_that_closes_instead_of_a_head_is_noticed(sent: int, text: str):
    with pair() as (one, other):
        one.sendall(bytes(sent))
        one.close()
        with pytest.raises(ConnectionResetError, match=text):
            PlainCarrier(other).receive_message(lambda: True)


@both_kinds
def test_a_sender_to_a_peer_that_is_gone_is_told(kind: str):
    with pair(kind=kind) as (one, other):
        other.close()
        with pytest.raises(ConnectionError):
            send_all(one, [memoryview(bytearray(1 << 20))] * 8)
        with pytest.raises(ConnectionError):
            send_now(one, [b"more"])


@both_kinds
def test_a_connection_shut_down_here_wakes_who_waits_on_it(kind: str):
    with pair(kind=kind) as (one, _):
        failed: list[BaseException] = []
        waiting = threading.Event()

        def read() -> None:
            waiting.set()
            try:
                receive_into(one, [memoryview(bytearray(1))])
            except ConnectionError as error:
                failed.append(error)

        reading = threading.Thread(target=read)
        reading.start()
        waiting.wait(60)
        one.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: bool(failed))
        reading.join()
