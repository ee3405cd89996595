"""Messages on a socket whose other end is slow, stalls, vanishes or lies."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import InvalidRequest
from ps_protocol.wire.socket_messages import (
    LENGTH,
    MAX_DESCRIPTORS,
    MAX_MESSAGE_BYTES,
    checked_length,
    framed,
    prepare,
    receive_head,
    receive_into,
    send_all,
    send_now,
)
from tests.support.length import examples
from tests.support.shards import wait_until

Pieces = list[memoryview | bytes]


@contextmanager
def pair(stall_seconds: float = 30.0, kind: str = "unix") -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected and prepared sockets."""
    if kind == "unix":
        one, other = socket.socketpair(socket.AF_UNIX)
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            one = socket.create_connection(listener.getsockname())
            other, _ = listener.accept()
    with one, other:
        for sock in (one, other):
            prepare(sock, stall_seconds)
        yield one, other


both_kinds = pytest.mark.parametrize("kind", ["unix", "tcp"])


def pattern(size: int, seed: int = 0) -> bytes:
    return bytes((i * 31 + seed) % 251 for i in range(min(size, 251))) * (size // 251 + 1)


def targets(sizes: list[int]) -> tuple[list[bytearray], list[memoryview]]:
    buffers = [bytearray(size) for size in sizes]
    return buffers, [memoryview(buffer) for buffer in buffers]


class Sending(threading.Thread):
    """Sends all pieces as a carrier does: now what goes now, the rest in a thread."""

    def __init__(self, sock: socket.socket, pieces: Pieces) -> None:
        super().__init__()
        self._sock = sock
        self._rest = send_now(sock, pieces)
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            send_all(self._sock, self._rest)
        except ConnectionError as error:
            self.error = error


@both_kinds
@examples(40)
@given(
    sent=st.lists(st.integers(0, 5000) | st.sampled_from([0, 1, 70_000, 300_000]), max_size=30),
    cuts=st.lists(st.integers(0, 6000), max_size=30),
    seed=st.integers(0, 250),
)
def test_what_is_sent_in_any_pieces_arrives_in_any_other_pieces(kind: str, sent: list[int], cuts: list[int], seed: int):
    pieces: Pieces = [memoryview(pattern(size, seed + n))[:size] for n, size in enumerate(sent)]
    whole = b"".join(pieces)
    sizes, left = [], len(whole)
    for cut in cuts:
        sizes.append(min(cut, left))
        left -= sizes[-1]
    buffers, views = targets([*sizes, left])
    with pair(kind=kind) as (one, other):
        sending = Sending(one, pieces)
        receive_into(other, views)
        sending.join()
    assert sending.error is None
    assert b"".join(buffers) == whole


@both_kinds
@pytest.mark.parametrize("count", [511, 512, 513, 1025, 3000])
def test_more_pieces_than_a_system_call_takes_are_all_sent(kind: str, count: int):
    pieces: Pieces = [bytes([n % 256]) * (n % 3) for n in range(count)]
    whole = b"".join(pieces)
    buffers, views = targets([len(whole)])
    with pair(kind=kind) as (one, other):
        rest = pieces
        while rest:
            rest = send_now(one, rest)
        receive_into(other, views)
    assert buffers[0] == whole


def test_nothing_is_sent_of_nothing():
    with pair() as (one, other):
        assert send_now(one, []) == []
        assert send_now(one, [b"", b""]) == []
        send_all(one, [b""])
        receive_into(other, [memoryview(b"")])
        one.sendall(b"x")
        assert other.recv(9) == b"x"


def test_sending_now_never_waits_and_returns_what_the_socket_did_not_take():
    with pair() as (one, other):
        pieces: Pieces = [pattern(100_000), memoryview(bytearray(pattern(4 << 20))), b"end"]
        rest = send_now(one, pieces)
        assert 0 < sum(map(len, rest)) < sum(map(len, pieces))
        again = send_now(one, rest)
        buffers, views = targets([sum(map(len, pieces))])
        reading = threading.Thread(target=receive_into, args=(other, views))
        reading.start()
        send_all(one, again)
        reading.join()
    assert buffers[0] == b"".join(pieces)


def test_messages_keep_their_borders():
    messages = [b"", b"a", pattern(70_000)]
    with pair() as (one, other):
        sending = Sending(one, [framed(message) for message in messages])
        for message in messages:
            length, descriptors = receive_head(other, lambda: True)
            buffers, views = targets([length])
            receive_into(other, views)
            assert (buffers[0], descriptors) == (message, [])
        sending.join()


def test_descriptors_come_with_the_first_byte_of_their_message():
    ends = os.pipe()
    with pair() as (one, other):
        assert send_now(one, [framed(b"first")]) == []
        send_all(one, [framed(b"second"), b"payload"], ends)
        assert receive_head(other, lambda: True) == (5, [])
        receive_into(other, [memoryview(bytearray(5))])
        length, descriptors = receive_head(other, lambda: True)
        assert (length, len(descriptors)) == (6, len(ends))
        (buffer,), views = targets([13])
        receive_into(other, views)
        assert buffer == b"secondpayload"
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
        late = threading.Thread(target=one.sendall, args=(head[1:],))
        late.start()
        length, descriptors = receive_head(other, lambda: True)
        late.join()
    assert (length, len(descriptors)) == (9, 1)
    for fd in (*ends, *descriptors):
        os.close(fd)


@pytest.mark.parametrize("sent", [LENGTH.pack(MAX_MESSAGE_BYTES + 1), LENGTH.pack(7)[:2]], ids=["too long", "cut off"])
def test_descriptors_of_a_message_that_is_refused_are_closed(sent: bytes):
    ends = os.pipe()
    with pair() as (one, other):
        before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
        socket.send_fds(one, [sent], list(ends))
        one.shutdown(socket.SHUT_WR)
        with pytest.raises((InvalidRequest, ConnectionResetError)):
            receive_head(other, lambda: True)
        assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    for fd in ends:
        os.close(fd)


def test_more_descriptors_than_a_message_may_have_are_not_kept():
    ends = [*os.pipe(), *os.pipe()]
    with pair() as (one, other):
        before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
        socket.send_fds(one, [LENGTH.pack(3)], ends)
        _, descriptors = receive_head(other, lambda: True)
        assert len(descriptors) == MAX_DESCRIPTORS
        for fd in descriptors:
            os.close(fd)
        assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    for fd in ends:
        os.close(fd)


def fill(sock: socket.socket) -> int:
    """Send until the socket takes no more; returns how many bytes."""
    total, data = 0, memoryview(bytearray(1 << 20))
    while taken := len(data) - sum(map(len, send_now(sock, [data]))):
        total += taken
    return total


def test_descriptors_wait_for_room_in_a_socket_that_is_full():
    ends = os.pipe()
    with pair() as (one, other):
        before = fill(one)
        sending = threading.Thread(target=send_all, args=(one, [framed(b"late")], ends))
        sending.start()
        receive_into(other, [memoryview(bytearray(before))])
        length, descriptors = receive_head(other, lambda: True)
        sending.join()
    assert (length, len(descriptors)) == (4, 2)
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


@given(header=st.binary(min_size=LENGTH.size, max_size=LENGTH.size))
def test_a_length_is_what_it_says_or_refused(header: bytes):
    wanted = int.from_bytes(header, "little")
    if wanted <= MAX_MESSAGE_BYTES:
        assert checked_length(header) == wanted
    else:
        with pytest.raises(InvalidRequest, match="too long"):
            checked_length(header)


def test_a_message_as_long_as_the_limit_is_taken():
    assert checked_length(LENGTH.pack(MAX_MESSAGE_BYTES)) == MAX_MESSAGE_BYTES


@both_kinds
def test_a_length_above_the_limit_is_refused_before_anything_is_read(kind: str):
    with pair(kind=kind) as (one, other):
        one.sendall(LENGTH.pack(MAX_MESSAGE_BYTES + 1) + b"rest")
        with pytest.raises(InvalidRequest, match=str(MAX_MESSAGE_BYTES)):
            receive_head(other, lambda: True)
        assert other.recv(9) == b"rest"


@both_kinds
def test_a_peer_that_stalls_in_the_middle_of_a_transfer_is_given_up(kind: str):
    with pair(stall_seconds=0.05, kind=kind) as (one, other):
        one.sendall(b"12345")
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
            receive_head(other, lambda: True)


def test_a_peer_that_gives_a_little_now_and_then_is_waited_for():
    """The limit is for nothing at all, not for the whole transfer."""
    with pair(stall_seconds=0.4) as (one, other):
        asked = threading.Semaphore(0)

        def drip() -> None:
            for byte in b"0123456789":
                asked.acquire()
                one.sendall(bytes([byte]))

        dripping = threading.Thread(target=drip)
        dripping.start()
        buffers, _ = targets([10])
        for at in range(10):
            asked.release()
            receive_into(other, [memoryview(buffers[0])[at : at + 1]])
        dripping.join()
    assert buffers[0] == b"0123456789"


def test_between_two_messages_a_peer_takes_its_time_as_long_as_it_is_alive():
    asked: list[None] = []

    def alive() -> bool:
        asked.append(None)
        if len(asked) == 3:
            one.sendall(framed(b"late"))
        return True

    with pair(stall_seconds=0.03) as (one, other):
        assert receive_head(other, alive) == (4, [])
    assert len(asked) == 3


def test_a_peer_that_is_dead_between_two_messages_is_given_up():
    with pair(stall_seconds=0.03) as (_, other), pytest.raises(ConnectionAbortedError, match="gone"):
        receive_head(other, lambda: False)


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
            receive_head(other, lambda: True)


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
        waiting.wait(10)
        one.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: bool(failed))
        reading.join()


def test_a_prepared_tcp_socket_sends_small_packets_at_once():
    with pair(kind="tcp") as (one, _):
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert one.gettimeout() is None
