"""Messages on a socket: in any pieces, with their borders, no longer than the limit."""

from __future__ import annotations

import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import InvalidRequest
from ps_protocol.wire.carrier import PlainCarrier
from ps_protocol.wire.socket_messages import (
    LENGTH,
    MAX_MESSAGE_BYTES,
    checked_length,
    framed,
    receive_into,
    send_all,
    send_now,
)
from tests.protocol.wire.socket_pairs import Pieces, Sending, both_kinds, pair, pattern, targets
from tests.support.length import examples


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
        carrier = PlainCarrier(other)
        for message in messages:
            assert carrier.receive_message(lambda: True)[0] == message
        sending.join()


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
def test_a_length_above_the_limit_is_refused(kind: str):
    with pair(kind=kind) as (one, other):
        one.sendall(LENGTH.pack(MAX_MESSAGE_BYTES + 1) + b"rest")
        with pytest.raises(InvalidRequest, match=str(MAX_MESSAGE_BYTES)):
            PlainCarrier(other).receive_message(lambda: True)


def test_a_prepared_tcp_socket_sends_small_packets_at_once():
    with pair(kind="tcp") as (one, _):
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert one.gettimeout() is None
