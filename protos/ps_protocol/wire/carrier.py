"""Carriers of a side channel's bytes: a plain socket, or the same socket under TLS (``tls_carrier``)."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from ps_protocol import times
from ps_protocol.wire import socket_messages
from ps_protocol.wire.socket_messages import LENGTH, MAX_MESSAGE_BYTES, checked_length


class Carrier(Protocol):
    """One connected socket. One thread at a time sends and one receives; the two may be different threads.

    All methods raise ConnectionError when the peer is gone or, where they wait, stalls longer than ``prepare`` said.
    """

    def prepare(self, stall_seconds: float = times.PATIENCE_SECONDS) -> None:
        """Blocking calls that give up when the peer stalls for so long, and no waiting for fuller packets."""
        ...

    def fileno(self) -> int:
        """The descriptor, to be watched by an event loop."""
        ...

    def keep_blocking(self) -> None:
        """Undo what an event loop does to a descriptor that it watches."""
        ...

    @property
    def ahead(self) -> memoryview:
        """Bytes that were read and not taken yet: the system does not tell of them."""
        ...

    def receive_now(self, view: memoryview) -> int:
        """Write what has come to ``view``; returns the bytes written, 0 at the end of the connection.

        Raises BlockingIOError when nothing has come.
        """
        ...

    def message_now(self, most_bytes: int) -> bytes | None:
        """The next message, where all of it has come; None: it has to be received in parts.

        Raises as ``receive_now``, and InvalidRequest for a message above ``most_bytes``.
        """
        ...

    def receive_message(self, alive: Callable[[], bool]) -> tuple[bytes | bytearray, list[int] | None]:
        """The next message, and the descriptors that came with it and what is read ahead; None: with the one before.

        Between two messages a peer may take its time, as long as it is ``alive``. Raises InvalidRequest for a message
        that is too long.
        """
        ...

    def receive_into(self, pieces: Sequence[memoryview]) -> None:
        """Fill ``pieces``; the interpreter lock is released while it waits and copies."""
        ...

    def send_all(self, pieces: Sequence[memoryview | bytes], descriptors: Sequence[int] = ()) -> None:
        """Send ``pieces``; ``descriptors``, which only Unix sockets take, go with the first byte."""
        ...

    def send_now(
        self, pieces: Sequence[memoryview | bytes], descriptors: Sequence[int] = ()
    ) -> list[memoryview | bytes]:
        """Send what the socket takes without waiting; returns what ``send_all`` has to send, empty when all is sent.

        ``descriptors`` as there: they have gone where any byte has.
        """
        ...

    def shut_down(self) -> None:
        """End the connection both ways: calls that wait return. Any thread; may be repeated."""
        ...

    def close(self) -> None:
        """Close the descriptor. No other call may be in progress."""
        ...


_BEGIN = LENGTH.size

READ_AHEAD_BYTES = 80 << 10
"""A message with a small payload in it, and what comes with it, in one call of the system."""


class PlainCarrier:
    """The bytes as they are; ``receive_now`` reads ahead, since small messages mostly come whole."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._buffer = memoryview(b"")
        #: Of the buffer: read ahead, and not taken yet.
        self.ahead = memoryview(b"")

    def prepare(self, stall_seconds: float = times.PATIENCE_SECONDS) -> None:
        """See Carrier."""
        socket_messages.prepare(self.socket, stall_seconds)

    def fileno(self) -> int:
        """See Carrier."""
        return self.socket.fileno()

    def keep_blocking(self) -> None:
        """See Carrier."""
        self.socket.setblocking(True)

    def receive_now(self, view: memoryview) -> int:
        """See Carrier."""
        if not self.ahead:
            if len(view) >= READ_AHEAD_BYTES:
                return self.socket.recv_into(view, 0, socket.MSG_DONTWAIT)
            self._read_ahead()
        return self._from_ahead(view)

    def _read_ahead(self) -> memoryview:
        self._buffer = self._buffer or memoryview(bytearray(READ_AHEAD_BYTES))
        self.ahead = self._buffer[: self.socket.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)]
        return self.ahead

    def _from_ahead(self, view: memoryview) -> int:
        taken = min(len(view), len(self.ahead))
        view[:taken] = self.ahead[:taken]
        self.ahead = self.ahead[taken:]
        return taken

    def message_now(self, most_bytes: int) -> bytes | None:
        """See Carrier."""
        ahead = self.ahead or self._read_ahead()
        if len(ahead) < _BEGIN:
            return None
        (length,) = LENGTH.unpack_from(ahead)
        if length > most_bytes:
            checked_length(ahead[:_BEGIN], most_bytes)
        if len(ahead) < (end := _BEGIN + length):
            return None
        self.ahead = ahead[end:]
        return bytes(ahead[_BEGIN:end])

    def receive_message(self, alive: Callable[[], bool]) -> tuple[bytes | bytearray, list[int] | None]:
        """See Carrier."""
        descriptors: list[int] | None = None
        if not self.ahead:
            self._buffer = self._buffer or memoryview(bytearray(READ_AHEAD_BYTES))
            got, descriptors = socket_messages.receive_first(self.socket, self._buffer, alive)
            self.ahead = self._buffer[:got]
        try:
            message: bytes | bytearray | None = self.message_now(MAX_MESSAGE_BYTES)
            if message is None:
                message = received_in_parts(self)
        except BaseException:
            for descriptor in descriptors or ():
                os.close(descriptor)
            raise
        return message, descriptors

    def receive_into(self, pieces: Sequence[memoryview]) -> None:
        """See Carrier."""
        if self.ahead:
            pieces = [piece[self._from_ahead(piece) :] for piece in pieces]
        socket_messages.receive_into(self.socket, pieces)

    def send_all(self, pieces: Sequence[memoryview | bytes], descriptors: Sequence[int] = ()) -> None:
        """See Carrier."""
        socket_messages.send_all(self.socket, pieces, descriptors)

    def send_now(
        self, pieces: Sequence[memoryview | bytes], descriptors: Sequence[int] = ()
    ) -> list[memoryview | bytes]:
        """See Carrier."""
        return socket_messages.send_now(self.socket, pieces, descriptors)

    def shut_down(self) -> None:
        """See Carrier."""
        shut_down(self.socket)

    def close(self) -> None:
        """See Carrier."""
        self.socket.close()


def received_in_parts(carrier: Carrier) -> bytearray:
    """The next message, its length first. Raises as ``receive_into``, and InvalidRequest."""
    head = bytearray(LENGTH.size)
    carrier.receive_into([memoryview(head)])
    message = bytearray(checked_length(head))
    carrier.receive_into([memoryview(message)])
    return message


def shut_down(sock: socket.socket) -> None:
    """End the connection of ``sock`` both ways. Does nothing if it has ended."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
