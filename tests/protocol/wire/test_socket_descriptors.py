"""File descriptors that come with a message."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from ps_protocol.errors import InvalidRequest
from ps_protocol.wire.carrier import PlainCarrier
from ps_protocol.wire.socket_messages import (
    LENGTH,
    MAX_DESCRIPTORS,
    MAX_MESSAGE_BYTES,
    framed,
    receive_into,
    send_all,
    send_now,
)
from tests.protocol.wire.socket_pairs import fill, pair, targets
from tests.support.descriptors import referring


def test_descriptors_come_with_the_call_that_reads_the_first_byte_of_their_message():
    ends = os.pipe()
    with pair() as (one, other):
        assert send_now(one, [framed(b"first")]) == []
        send_all(one, [framed(b"second"), b"payload"], ends)
        carrier = PlainCarrier(other)
        first, descriptors = carrier.receive_message(lambda: True)
        second, behind = carrier.receive_message(lambda: True)
        assert (first, second) == (b"first", b"second")
        assert descriptors is not None
        assert behind is None  # the system gives both messages in one call: the second one's come with the first
        assert len(descriptors) == len(ends)
        (buffer,), views = targets([7])
        carrier.receive_into(views)
        assert buffer == b"payload"
        assert not any(os.get_inheritable(fd) for fd in descriptors)
    os.write(descriptors[1], b"through the pipe")
    assert os.read(ends[0], 99) == b"through the pipe"
    for fd in (*ends, *descriptors):
        os.close(fd)


def test_a_head_that_comes_in_two_parts_brings_its_descriptors():
    ends = os.pipe()
    with pair() as (one, other):
        head = LENGTH.pack(9)
        socket.send_fds(one, [head[:1]], [ends[0]])
        late = threading.Thread(target=one.sendall, args=(head[1:] + b"nine more",))
        late.start()
        message, descriptors = PlainCarrier(other).receive_message(lambda: True)
        late.join()
    assert (message, len(descriptors)) == (b"nine more", 1)
    for fd in (*ends, *descriptors):
        os.close(fd)


@pytest.mark.parametrize("sent", [LENGTH.pack(MAX_MESSAGE_BYTES + 1), LENGTH.pack(7)[:2]], ids=["too long", "cut off"])
def test_descriptors_of_a_message_that_is_refused_are_closed(sent: bytes):
    ends = os.pipe()
    with pair() as (one, other):
        socket.send_fds(one, [sent], list(ends))
        one.shutdown(socket.SHUT_WR)
        with pytest.raises((InvalidRequest, ConnectionResetError)):
            PlainCarrier(other).receive_message(lambda: True)
        assert [referring(os.readlink(f"/proc/self/fd/{fd}")) for fd in ends] == [2, 2]  # noqa: PTH115
    for fd in ends:
        os.close(fd)


def test_more_descriptors_than_a_message_may_have_are_not_kept():
    ends = [*os.pipe(), *os.pipe()]
    with pair() as (one, other):
        socket.send_fds(one, [framed(b"few")], ends)
        _, descriptors = PlainCarrier(other).receive_message(lambda: True)
        assert len(descriptors) == MAX_DESCRIPTORS
        for fd in descriptors:
            os.close(fd)
        assert [referring(os.readlink(f"/proc/self/fd/{fd}")) for fd in ends] == [2] * 4  # noqa: PTH115
    for fd in ends:
        os.close(fd)


def test_descriptors_wait_for_room_in_a_socket_that_is_full():
    ends = os.pipe()
    with pair() as (one, other):
        before = fill(one)
        sending = threading.Thread(target=send_all, args=(one, [framed(b"late")], ends))
        sending.start()
        receive_into(other, [memoryview(bytearray(before))])
        message, descriptors = PlainCarrier(other).receive_message(lambda: True)
        sending.join()
    assert (message, len(descriptors)) == (b"late", 2)
    for fd in (*ends, *descriptors):
        os.close(fd)


def test_descriptors_for_a_peer_that_does_not_read_are_given_up():
    ends = os.pipe()
    with pair(stall_seconds=0.05) as (one, _):
        fill(one)
        with pytest.raises(ConnectionAbortedError, match="stalled"):
            send_all(one, [framed(b"")], ends)
    for fd in ends:
        os.close(fd)
