"""Packets between workers of a host: nothing from another process is believed unchecked."""

from __future__ import annotations

import json

import pytest

from ps_protocol.errors import InvalidRequest
from ps_worker.host.messages import (
    Away,
    Deposit,
    HostHello,
    HostRefusal,
    HostWelcome,
    LentSegment,
    RoundAnswer,
    Separate,
    ShardAnswer,
    from_bytes,
    numbers_of,
    runs_of,
    to_bytes,
)

PART = ShardAnswer(1, 4, 5, 3, 0, 2, (0, 2), True)
MESSAGES = (
    HostHello(1, 2, 3, 4, "model", "raw"),
    HostWelcome(0, 1, 7),
    LentSegment(1, 4096),
    Deposit(1, 0, 1, 1, 0.5, False, True, (0, 1), (3, 4), (1, 2), "[]", (0, 3, 2, 1), 3),
    Away(1 << 63, 0),
    RoundAnswer(0.25, "[]", (PART, PART)),
    RoundAnswer(0.25, "[]", ()),
    Separate("no"),
    HostRefusal("why", "this", "that"),
)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_read_as_it_was_sent(message):
    assert from_bytes(to_bytes(message)) == message


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'["Nothing"]',
        b'["Separate"]',
        b'["Separate",1]',
        b'["Away",1,-1]',
        b'["Away",1,true]',
        b'["Away",1,18446744073709551616]',
        b'["Away",1,2,3]',
        json.dumps(["Deposit", 1, 0, 1, 1, "x", False, True, [], [], [], "", [], 0]).encode(),
        json.dumps(["Deposit", 1, 0, 1, 1, 1.0, 0, True, [], [], [], "", [], 0]).encode(),
        json.dumps(["Deposit", 1, 0, 1, 1, 1.0, False, True, 3, [], [], "", [], 0]).encode(),
        json.dumps(["RoundAnswer", 0.0, "", [[1]]]).encode(),
        b"[" * 100_000,
    ],
)
def test_what_is_no_message_is_refused(packet):
    with pytest.raises(InvalidRequest, match="no message"):
        from_bytes(packet)


def test_numbers_travel_as_runs():
    assert runs_of([]) == ()
    assert runs_of([1, 2, 3, 7]) == (1, 4, 7, 8)
    assert numbers_of((1, 4, 7, 8), 8) == (1, 2, 3, 7)


@pytest.mark.parametrize("runs", [(1,), (3, 2), (0, 4, 2, 5), (0, 9)])
def test_runs_that_do_not_rise_or_end_too_late_are_refused(runs):
    with pytest.raises(InvalidRequest, match="do not rise"):
        numbers_of(runs, 8)
