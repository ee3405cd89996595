"""One end of a connection between two workers of a host, on a Unix socket."""

from __future__ import annotations

import array
import select
import socket

from ps_protocol.errors import InvalidRequest
from ps_protocol.wire.shared_memory import SharedMemory
from ps_worker.host.folder import OwnDescriptors
from ps_worker.host.memory import LentSegments, MappedSegments
from ps_worker.host.messages import MAX_BYTES, LentSegment, Message, from_bytes, to_bytes


class HostConnection:
    """One end of a connection. Its packets are whole messages; a descriptor comes with that of its segment."""

    def __init__(self, sock: socket.socket, descriptors: OwnDescriptors) -> None:
        self.socket = sock
        self._descriptors = descriptors
        self._buffer = bytearray(MAX_BYTES)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        #: What the other end is told of, and what it has told of here.
        self.lent, self.mapped = LentSegments(), MappedSegments()
        self.is_closed = False

    def send(self, message: Message, descriptor: int | None = None) -> None:
        """Send ``message``. Raises OSError."""
        passed = [descriptor] if descriptor is not None else []
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))] if passed else []
        self.socket.sendmsg([to_bytes(message)], rights)

    def lend(self, segment: SharedMemory) -> int:
        """Tell the other end of ``segment``, unless it knows it; returns its number. Raises OSError."""
        number, is_new = self.lent.number(segment)
        if is_new:
            self.send(LentSegment(number, len(segment.bytes)), segment.fd)
        return number

    def receive(self, timeout_seconds: float) -> Message | None:
        """The next message; None: none has come in time. Segments are mapped, and not returned.

        Raises ConnectionError when the other end has closed it, InvalidRequest, OSError.
        """
        while self._poll.poll(timeout_seconds * 1000):
            # Not socket.recv_fds, which drops its flags (seen in Python 3.11): child processes would inherit them.
            got, extras, _, _ = self.socket.recvmsg_into([self._buffer], 64, socket.MSG_CMSG_CLOEXEC)
            fds = [fd for _, _, data in extras for fd in array.array("i", data[: len(data) // 4 * 4])]
            if not got:
                raise ConnectionResetError("the other worker has closed the connection")
            message = from_bytes(memoryview(self._buffer)[:got])
            if not isinstance(message, LentSegment):
                return message
            if len(fds) != 1:
                raise InvalidRequest("a segment came without its descriptor", actual=f"{len(fds)} descriptors")
            try:
                self.mapped.add(message.number, fds[0], message.size_bytes)
            except ValueError as error:
                raise InvalidRequest("a segment is smaller than was said", actual=str(error)) from error
        return None

    def has_ended(self) -> bool:
        """Whether the other end has closed it, as of now: what was read of its memory before is as it was lent then."""
        try:
            return self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close this end. Safe to repeat."""
        self.is_closed = True
        self._descriptors.close(self.socket)
