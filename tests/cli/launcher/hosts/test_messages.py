"""Frames and messages between ps-run and its program on a host: there and back, in any pieces; nonsense is refused."""

from __future__ import annotations

import signal

import pytest

from ps_protocol.errors import InvalidRequest
from ps_server.cli.launcher.events import ProcessName, ProcessRole
from ps_server.cli.launcher.hosts.messages import (
    MAX_FRAME_BYTES,
    Alive,
    Begin,
    Declined,
    Ended,
    FrameReader,
    Hello,
    Launch,
    Printed,
    Ready,
    SendSignal,
    Serving,
    encode,
    pack,
    unpack,
)
from tests.support.seeds import seeded

WORKER = ProcessName(ProcessRole.WORKER, 3)
NAMED = {"part": "worker", "index": 3}
MESSAGES = [
    Hello("0.1"),
    Begin("h", "/w", "train.py", "/d", "lock", 60.0),
    Ready(4, "10.0.0.1", "10.0.0.2", True, "/d"),
    Declined("no", "this", "that", "so"),
    Launch(WORKER, ("python", "ü"), {"A": "b"}, {"PS_TLS_KEY": b"\0\xff"}),
    SendSignal(WORKER, signal.SIGTERM),
    Printed(WORKER, b"\xff\0\n"),
    Serving("a:1"),
    Ended(WORKER, -9, 1 << 40),
    Alive(),
]


def test_messages_come_back_in_any_pieces():
    chance = seeded()
    data = b"".join(map(pack, MESSAGES))
    reader, found = FrameReader(), []
    while data:
        size = chance.choice((1, 3, 50))
        found += [unpack(*frame) for frame in reader.feed(data[:size])]
        data = data[size:]
    assert found == MESSAGES


def test_no_secret_is_in_the_words_of_a_message():
    launch = Launch(WORKER, ("python",), {"PS_TOKEN": "secret"}, {"PS_TLS_KEY": b"secret"})
    assert "secret" not in repr(launch)


@pytest.mark.parametrize(
    "data",
    [
        encode({})[:8].replace(b"\x02", b"\x03", 1) + b"abc",
        b"\xff" * 8,
        (MAX_FRAME_BYTES + 1).to_bytes(4) + bytes(4),
        encode([1]),  # type: ignore[arg-type]
        (100_000).to_bytes(4) + bytes(4) + b"[" * 100_000,
    ],
)
def test_what_is_no_frame_is_refused(data):
    with pytest.raises(InvalidRequest, match="no message"):
        list(FrameReader().feed(data))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kind": "other"},
        {"kind": "ended", "process": NAMED},
        {"kind": "ended", "process": {"part": "boss", "index": 0}, "code": 0, "peak_bytes": 0},
        {"kind": "signal", "process": NAMED, "signal": 4711},
        {"kind": "launch", "process": NAMED, "command": [], "environment": {}, "files": {"a": "!"}},
        {"kind": "launch", "process": NAMED, "command": [1], "environment": {}, "files": {}},
        {"kind": "launch", "process": NAMED, "command": [], "environment": {"A": 1}, "files": {}},
        {"kind": "ended", "process": NAMED, "code": "0", "peak_bytes": 0},
        {"kind": "alive", "more": 1},
        {"kind": "printed", "process": 3},
    ],
)
def test_what_is_no_message_is_refused(fields):
    with pytest.raises(InvalidRequest, match="not known"):
        unpack(fields, b"")
