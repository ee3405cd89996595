"""The bar for TLS: a socket of Python's ``ssl`` on loopback, ``sendall`` and ``recv_into``, ready buffers, TLS 1.3."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.crew import Crew
from benchmarks.peers.raw_socket import BOTH, receive_exactly
from benchmarks.processes import Child
from benchmarks.rows import Key, Subject
from benchmarks.timing import Loop
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_server.certs import CertificateFolder

SYSTEM = "python ssl socket (tls)"


def subject(nbytes: int) -> Subject:
    """``nbytes`` there and back."""

    @contextmanager
    def opened() -> Iterator[Crew]:
        with tempfile.TemporaryDirectory(prefix="ps-bench-ssl-") as path:
            CertificateFolder(Path(path) / "certs").make(1, [])
            with Child(server, path, nbytes) as far, Child(worker, far.ready(), path, nbytes) as near:
                near.ready()
                yield Crew([near], [far.pid], rests=[near, far])

    return Subject((Key(SYSTEM, BOTH, nbytes),), opened)


class _Listener:
    """Serves one connection: receives all, then sends as much."""

    def __init__(self, path: str, nbytes: int) -> None:
        security = Security(_folder(path).settings("shard-0", require_client=False), AccessRole.SERVER, listens=True)
        context = security.server_context()
        assert context is not None
        self._context = context
        self._held = memoryview(bytearray(nbytes))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        plain, _ = self.listener.accept()
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._context.wrap_socket(plain, server_side=True) as connection:
            while receive_exactly(connection, self._held):
                connection.sendall(self._held)


@contextmanager
def server(path: str, nbytes: int) -> Iterator[_Listener]:
    """The role of the far side."""
    held = _Listener(path, nbytes)
    with held.listener:
        yield held


@contextmanager
def worker(address: tuple[str, int], path: str, nbytes: int) -> Iterator[Loop]:
    """The role of the near side, which is timed."""
    context = Security(_folder(path).settings("worker", role=AccessRole.WORKER), AccessRole.WORKER).client_context()
    assert context is not None
    gradient, parameters = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
    plain = socket.create_connection(address)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with context.wrap_socket(plain, server_hostname=address[0]) as connection:

        def run() -> None:
            connection.sendall(gradient)
            if not receive_exactly(connection, parameters):
                raise ConnectionResetError("the far side ended")

        yield Loop({BOTH: run})


def _folder(path: str) -> CertificateFolder:
    return CertificateFolder(Path(path) / "certs")
