"""What a carrier in clear reads ahead is given out in order, whichever way it is asked for. Costs a second."""

from __future__ import annotations

from contextlib import suppress

import pytest

from ps_protocol.wire.carrier import READ_AHEAD_BYTES, PlainCarrier
from tests.protocol.wire.socket_pairs import Sending, both_kinds, pair, pattern
from tests.support.seeds import seeded


def some_now(carrier: PlainCarrier, view: memoryview) -> int:
    """What ``receive_now`` returns once something has come: TCP takes its time, also on one machine."""
    while True:
        with suppress(BlockingIOError):
            return carrier.receive_now(view)


def taken_now(carrier: PlainCarrier, view: memoryview) -> None:
    """Fill ``view`` by ``receive_now``, as often as that takes."""
    while view:
        view = view[some_now(carrier, view) :]


@both_kinds
def test_small_and_large_reads_of_both_ways_give_every_byte_once_and_in_order(kind: str):
    draw, whole = seeded(), bytes(pattern(3 << 20, 1))[: 3 << 20]
    got = memoryview(bytearray(len(whole)))
    with pair(kind=kind) as (one, other):
        carrier, sending, at = PlainCarrier(other), Sending(one, [whole]), 0
        while at < len(whole):
            size = draw.choice([0, 1, 4, 100, 10_000, READ_AHEAD_BYTES - 1, READ_AHEAD_BYTES, 300_000])
            view = got[at : at + size]
            if draw.random() < 0.5:
                taken_now(carrier, view)
            else:
                carrier.receive_into([view[: size // 3], view[size // 3 :]])
            at += size
        sending.join()
    assert got == whole


@both_kinds
def test_after_all_that_had_come_it_says_once_that_nothing_has_and_asks_again_then(kind: str):
    view = memoryview(bytearray(8))
    with pair(kind=kind) as (one, other):
        carrier = PlainCarrier(other)
        with pytest.raises(BlockingIOError):
            carrier.receive_now(view)
        for message in (b"first", b"second"):
            one.sendall(message)
            taken_now(carrier, view[: len(message)])
            assert view[: len(message)] == message
            with pytest.raises(BlockingIOError):
                carrier.receive_now(view)
        one.close()
        assert some_now(carrier, view) == 0
