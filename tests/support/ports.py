"""Ports of 127.0.0.1 for tests that need an address before a server has it."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
