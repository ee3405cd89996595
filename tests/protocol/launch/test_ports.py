"""Ports that are chosen before a server has them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ps_protocol.launch import ports


def test_a_port_that_is_chosen_is_free_and_none_that_the_system_gives_to_others() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(20):
        port = ports.free_port()
        assert 1024 < port < max(first, 32_768)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_a_port_that_is_taken_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    port = ports.free_port()
    monkeypatch.setattr(ports, "_FIRST", port)
    monkeypatch.setattr(ports, "_LAST", port + 1)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        with pytest.raises(OSError, match="no free port"):
            ports.free_port()
    assert ports.free_port() == port
