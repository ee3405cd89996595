"""Two connected sockets, and what tests send through them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ps_protocol.wire.socket_messages import prepare, send_all, send_now

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


def fill(sock: socket.socket) -> int:
    """Send until the socket takes no more; returns how many bytes."""
    total, data = 0, memoryview(bytearray(1 << 20))
    while taken := len(data) - sum(map(len, send_now(sock, [data]))):
        total += taken
    return total
