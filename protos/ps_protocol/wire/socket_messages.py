"""Messages on a side channel: each behind its length, on a blocking socket whose other end may stall or lie."""

from __future__ import annotations

import select
import socket
import struct
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial

from ps_protocol import times
from ps_protocol.errors import InvalidRequest

LENGTH = struct.Struct("<I")

MAX_MESSAGE_BYTES = 4 << 20
"""No message is longer, payloads aside: the limit of gRPC."""

INLINE_BYTES = 64 << 10
"""A payload up to this size is sent inside its message: one write, one read, no second wake-up."""

TOKEN_BYTES = 32

ATTACH_BYTES = 128
"""No message is longer on a side channel before its token was shown."""


MAX_DESCRIPTORS = 4
"""No message comes with more."""

_DESCRIPTORS_SIZE = socket.CMSG_LEN(MAX_DESCRIPTORS * array("i").itemsize)
_RIGHTS = (socket.SOL_SOCKET, socket.SCM_RIGHTS)

_MAX_PIECES = 512  # of one system call; Linux takes 1024


def checked_length(header: bytes | bytearray | memoryview, most_bytes: int = MAX_MESSAGE_BYTES) -> int:
    """The length that ``header`` announces. Raises InvalidRequest above ``most_bytes``."""
    (length,) = LENGTH.unpack(header)
    if length > most_bytes:
        raise InvalidRequest(
            "a message on a side channel is too long", expected=f"at most {most_bytes} bytes", actual=str(length)
        )
    return int(length)


def framed(message: bytes) -> bytes:
    """``message`` behind its length."""
    return LENGTH.pack(len(message)) + message


def framed_pieces(message: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """``message``, in pieces, behind its length."""
    return [LENGTH.pack(sum(map(len, message))) + message[0], *message[1:]]


def prepare(sock: socket.socket, stall_seconds: float = times.PATIENCE_SECONDS) -> None:
    """Make ``sock`` ready: blocking calls that give up when the peer stalls, no waiting for fuller packets."""
    sock.setblocking(True)
    timeout = struct.pack("ll", int(stall_seconds), int(stall_seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def receive_first(sock: socket.socket, view: memoryview, alive: Callable[[], bool]) -> tuple[int, list[int]]:
    """Write what comes first, once something does, to ``view``: bytes written, and the descriptors that came with them.

    The peer may take its time, as long as it is ``alive``. Raises ConnectionError.
    """
    while True:
        try:
            # Not socket.recv_fds, which drops its flags (seen in Python 3.11): child processes would inherit them.
            got, extras, _, _ = sock.recvmsg_into([view], _DESCRIPTORS_SIZE, socket.MSG_CMSG_CLOEXEC)
            break
        except BlockingIOError as error:
            if not alive():
                raise ConnectionAbortedError("the peer is gone") from error
    if not got:
        raise ConnectionResetError("the peer closed the connection")
    if not extras:
        return got, []
    return got, [fd for level, kind, data in extras if (level, kind) == _RIGHTS for fd in array("i", data)]


def receive_into(sock: socket.socket, pieces: Sequence[memoryview]) -> None:
    """Fill ``pieces`` from ``sock``; the interpreter lock is released while it waits and copies.

    Raises ConnectionError when the peer is gone, or gives nothing for the time ``prepare`` set.
    """
    for piece in pieces:
        at = 0
        while at < len(piece):
            got = patiently(sock, select.POLLIN, partial(sock.recv_into, piece[at:], 0, socket.MSG_WAITALL))
            if got == 0:
                raise ConnectionResetError("the peer closed the connection in the middle of a transfer")
            at += got


def send_all(sock: socket.socket, pieces: Sequence[memoryview | bytes], descriptors: Sequence[int] = ()) -> None:
    """Send ``pieces``; the interpreter lock is released while it waits and copies. Raises as ``receive_into``.

    ``descriptors`` go with the first byte.
    """
    if descriptors:
        sent = patiently(sock, select.POLLOUT, partial(socket.send_fds, sock, pieces[:1], list(descriptors)))
        pieces = _after(sent, pieces)
    for piece in pieces:
        view = memoryview(piece)
        while len(view):
            view = view[patiently(sock, select.POLLOUT, partial(sock.send, view)) :]


def patiently(sock: socket.socket, event: int, call: Callable[[], int]) -> int:
    """The result of ``call`` on ``sock``, which may wait for ``event`` as long as ``prepare`` allows.

    Raises ConnectionAbortedError when that is over.
    """
    began = time.monotonic()
    while True:
        try:
            return call()
        except BlockingIOError as error:
            # Before its time: an event loop that began to watch the socket has made it non-blocking for a moment.
            seconds, micros = struct.unpack("ll", sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))
            left = began + seconds + micros / 1e6 - time.monotonic()
            poll = select.poll()
            poll.register(sock, event)
            if left <= 0 or not poll.poll(left * 1000):
                raise ConnectionAbortedError("the peer stalled in the middle of a transfer") from error


def send_now(
    sock: socket.socket, pieces: Sequence[memoryview | bytes], descriptors: Sequence[int] = ()
) -> list[memoryview | bytes]:
    """Send what ``sock`` takes without waiting; returns the rest. Raises ConnectionError.

    ``descriptors`` go with the first byte.
    """
    extras = [(*_RIGHTS, array("i", descriptors))] if descriptors else []
    try:
        sent = sock.sendmsg(pieces[:_MAX_PIECES], extras, socket.MSG_DONTWAIT)
    except BlockingIOError:
        sent = 0
    return _after(sent, pieces) if sent < sum(map(len, pieces)) else []


def _after(sent: int, pieces: Sequence[memoryview | bytes]) -> list[memoryview | bytes]:
    """What is left of ``pieces`` after the first ``sent`` bytes."""
    for number, piece in enumerate(pieces):
        if sent < len(piece):
            return [memoryview(piece)[sent:], *pieces[number + 1 :]]
        sent -= len(piece)
    return []
