"""The bar for TCP: one plain socket on loopback between two processes, ``sendall`` and ``recv_into``, ready buffers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from benchmarks.crew import Crew
from benchmarks.floor import sgd
from benchmarks.processes import Child
from benchmarks.rows import Key, Subject
from benchmarks.timing import Loop

SYSTEM = "raw socket"
PUSH, PULL, BOTH, STEP = "push", "pull", "push+pull", "step"

#: Of the length that payloads are aligned to: on some processors a copy between socket and memory takes two to three
#: times as long where one begins a few bytes behind the other, which other lengths bring about.
_WORD_BYTES = 64
_CODES = {operation: operation.encode().ljust(_WORD_BYTES) for operation in (PUSH, PULL, BOTH, STEP)}
_ACK = b".".ljust(_WORD_BYTES)


def subject(nbytes: int, operations: tuple[str, ...] = (PUSH, PULL, BOTH, STEP)) -> Subject:
    """``nbytes`` there (push), back (pull), there and back; a step applies fused SGD in between, on the whole."""

    @contextmanager
    def opened() -> Iterator[Crew]:
        with Child(server, nbytes) as far, Child(worker, far.ready(), nbytes, operations) as near:
            near.ready()
            yield Crew([near], [far.pid], rests=[near, far])

    return Subject(tuple(Key(SYSTEM, operation, nbytes) for operation in operations), opened)


class _Listener:
    """Serves each connection in a thread of its own; the first word says what its operation is."""

    def __init__(self, nbytes: int) -> None:
        self.parameters, self.gradient, self.apply = sgd(nbytes)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        up, down = (memoryview(held.numpy().data).cast("B") for held in (self.gradient, self.parameters))
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            word = memoryview(bytearray(_WORD_BYTES))
            if not receive_exactly(connection, word):
                return
            code = bytes(word)
            waits = word if code == _CODES[PULL] else up
            sends = _ACK if code == _CODES[PUSH] else down
            while receive_exactly(connection, waits):
                if code == _CODES[STEP]:
                    self.apply()
                connection.sendall(sends)


@contextmanager
def server(nbytes: int) -> Iterator[_Listener]:
    """The role of the far side."""
    held = _Listener(nbytes)
    with held.listener:
        yield held


@contextmanager
def worker(address: tuple[str, int], nbytes: int, operations: tuple[str, ...]) -> Iterator[Loop]:
    """The role of the near side, which is timed."""
    gradient, parameters = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
    word = memoryview(bytearray(_WORD_BYTES))

    def exchange(connection: socket.socket, operation: str) -> Callable[[], object]:
        sends = _ACK if operation == PULL else gradient
        receives = word if operation == PUSH else parameters

        def run() -> None:
            connection.sendall(sends)
            if not receive_exactly(connection, receives):
                raise ConnectionResetError("the far side ended")

        return run

    with ExitStack() as stack:
        loops = {}
        for operation in operations:
            connection = stack.enter_context(socket.create_connection(address))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(_CODES[operation])
            loops[operation] = exchange(connection, operation)
        yield Loop(loops)


def receive_exactly(connection: socket.socket, into: memoryview) -> bool:
    """Fill ``into``; False when the connection ended before."""
    done = 0
    while done < len(into):
        try:
            received = connection.recv_into(into[done:])
        except ConnectionResetError:
            return False
        if not received:
            return False
        done += received
    return True
