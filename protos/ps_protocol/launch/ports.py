"""A port of 127.0.0.1 for programs that need an address before a server has it, or again after it."""

from __future__ import annotations

import random
import socket

_FIRST, _LAST = 12_000, 32_000
"""Below the ports that Linux gives to clients and to servers that ask for any: none of them takes one in between."""


def free_port() -> int:
    """A port that nobody listens on; who asks at the same moment gets the same with a chance of 1 in 20,000."""
    choice = random.SystemRandom()
    for _ in range(1000):
        port = choice.randrange(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port from {_FIRST} to {_LAST} in 1000 tries")
