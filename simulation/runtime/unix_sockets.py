"""Stands for Unix sockets between processes of one host, with descriptors in their packets, and for waiting on them."""

from __future__ import annotations

import array
import errno
import os
import select
import selectors
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from simulation.runtime.disk import Files
from simulation.runtime.kernel import Process
from simulation.runtime.wait import Wait, kernel, process

_PACKETS = 64
"""Packets that wait to be received before no more are taken: the time limit of a sender is over at once."""


_MOST_SPINS = 10_000


class UnixSockets:
    """Of one run: what listens where, and the sockets of each process, which end with it."""

    def __init__(self, files: Files) -> None:
        self.files = files
        #: By address.
        self.listeners: dict[str, UnixSocket] = {}
        self._open: dict[Process, dict[UnixSocket, None]] = {}

    def socket(self, family: int = socket.AF_UNIX, kind: int = socket.SOCK_SEQPACKET) -> UnixSocket:
        """As ``socket.socket``."""
        return UnixSocket(self, process())

    def socketpair(self) -> tuple[UnixSocket, UnixSocket]:
        """As ``socket.socketpair``."""
        return _joined(self.socket(), self.socket())

    def opened(self, each: UnixSocket, owner: Process) -> None:
        """``owner`` has it from now on."""
        if owner not in self._open:
            self._open[owner] = {}
            owner.at_end.append(lambda: self._end(owner))
        self._open[owner][each] = None

    def closed(self, each: UnixSocket, owner: Process) -> None:
        """``owner`` has closed it."""
        self._open.get(owner, {}).pop(each, None)

    def _end(self, owner: Process) -> None:
        for each in list(self._open.pop(owner)):
            each.close()


class UnixSocket:
    """As ``socket.socket``: connected, listening, or neither. Packets arrive whole and in order."""

    def __init__(self, sockets: UnixSockets, owner: Process) -> None:
        self._sockets, self._owner = sockets, owner
        sockets.opened(self, owner)
        #: The other end.
        self.peer: UnixSocket | None = None
        #: Data and descriptors, the oldest first.
        self._packets: deque[tuple[bytes, list[int]]] = deque()
        #: Ends that have connected here and were not accepted.
        self._backlog: deque[UnixSocket] = deque()
        self._address = ""
        #: The other end was closed, and this one.
        self._has_ended = self._is_closed = False
        #: Called when something may be read.
        self.watchers: dict[Callable[[], None], None] = {}

    @property
    def is_ready(self) -> bool:
        """Whether a read would not wait. One that is closed is not watched any more."""
        return not self._is_closed and bool(self._packets or self._backlog or self._has_ended)

    def settimeout(self, seconds: float | None) -> None:
        """As ``socket.settimeout``."""

    def setsockopt(self, *_: object) -> None:
        """As ``socket.setsockopt``."""

    def getsockopt(self, *_: object) -> bytes:
        """Who is at the other end: this user."""
        return struct.pack("iII", os.getpid(), os.geteuid(), os.getegid())

    # -- connecting

    def bind(self, address: str) -> None:
        """As ``socket.bind``."""
        self._address = address

    def listen(self, backlog: int = 0) -> None:
        """As ``socket.listen``."""
        self._sockets.listeners[self._address] = self

    def connect(self, address: str) -> None:
        """As ``socket.connect``; also to a process that stands still."""
        kernel().check_alive()
        listener = self._sockets.listeners.get(address)
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        accepted = UnixSocket(self._sockets, listener._owner)
        _joined(self, accepted)
        listener._backlog.append(accepted)
        listener._notify()

    def accept(self) -> tuple[UnixSocket, str]:
        """As ``socket.accept``, of a socket that is ready."""
        kernel().check_alive()
        if not self._backlog:
            raise BlockingIOError(errno.EAGAIN, "nobody has connected")
        return self._backlog.popleft(), ""

    # -- packets

    def send(self, data: bytes) -> int:
        """As ``socket.send``."""
        return self.sendmsg([data])

    def sendmsg(self, buffers: Sequence[Any], ancillary: Sequence[tuple[int, int, Any]] = ()) -> int:
        """As ``socket.sendmsg``."""
        kernel().check_alive()
        peer = self.peer
        if self._is_closed or peer is None or peer._is_closed:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        if len(peer._packets) >= _PACKETS:
            raise TimeoutError("timed out")
        data = b"".join(bytes(each) for each in buffers)
        passed = [os.dup(descriptor) for _, _, descriptors in ancillary for descriptor in descriptors]
        peer._packets.append((data, passed))
        peer._notify()
        return len(data)

    def recvmsg_into(self, buffers: Sequence[Any], size: int = 0, flags: int = 0) -> tuple[int, list[Any], int, None]:
        """As ``socket.recvmsg_into``; the descriptors are the receiver's."""
        self._check_open()
        Poll(self).poll()
        if not self._packets:
            return 0, [], 0, None
        data, passed = self._packets.popleft()
        buffers[0][: len(data)] = data
        for descriptor in passed:
            self._sockets.files.take_over(descriptor)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed).tobytes())] if passed else []
        return len(data), rights, 0, None

    def recv(self, size: int, flags: int = 0) -> bytes:
        """As ``socket.recv``."""
        self._check_open()
        if flags & socket.MSG_DONTWAIT and not self.is_ready:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        Poll(self).poll()
        if not self._packets:
            return b""
        data = self._packets[0][0] if flags & socket.MSG_PEEK else self._packets.popleft()[0]
        return data[:size]

    def _check_open(self) -> None:
        kernel().check_alive()
        if self._is_closed:
            raise OSError(errno.EBADF, "Bad file descriptor")

    def shutdown(self, how: int) -> None:
        """Nothing: ``close`` follows, and no child keeps a simulated socket."""

    def close(self) -> None:
        """As ``socket.close``: the other end receives what was sent, then the end. Safe to repeat."""
        if self._is_closed:
            return
        self._is_closed = True
        self._sockets.closed(self, self._owner)
        if self._sockets.listeners.get(self._address) is self:
            del self._sockets.listeners[self._address]
        for waiting in self._backlog:
            waiting.close()
        for _, passed in self._packets:
            _close_all(passed)
        self._packets.clear()
        if self.peer is not None:
            self.peer._has_ended = True
            self.peer._notify()

    def _notify(self) -> None:
        for watcher in list(self.watchers):
            watcher()


class Poll:
    """As ``select.poll``: which of its sockets may be read."""

    def __init__(self, *watched: UnixSocket) -> None:
        self._watched = dict.fromkeys(watched)
        #: When it found something last, and how often without a wait since.
        self._found_at, self._spins = -1.0, 0

    def register(self, each: UnixSocket, events: int = select.POLLIN) -> None:
        """Wait for ``each``, too."""
        self._watched[each] = None

    def unregister(self, each: UnixSocket) -> None:
        """Wait for ``each`` no more."""
        del self._watched[each]

    def poll(self, milliseconds: float | None = None) -> list[tuple[UnixSocket, int]]:
        """Those that may be read; none: the time is over."""
        deadline = None if milliseconds is None else kernel().now + milliseconds / 1000
        while not (ready := [(each, select.POLLIN) for each in self._watched if each.is_ready]):
            left = None if deadline is None else deadline - kernel().now
            if left is not None and left <= 0:
                break
            wait = Wait()
            for each in self._watched:
                each.watchers[wait.wake] = None
            try:
                wait.pause(left)
            finally:
                for each in self._watched:
                    each.watchers.pop(wait.wake, None)
        now = kernel().now
        self._spins = self._spins + 1 if ready and now == self._found_at else 0
        self._found_at = now
        if self._spins > _MOST_SPINS:
            kernel().fail(f"{process()} waits for sockets again and again that it does not read")
        return ready


class Selector:
    """As ``selectors.DefaultSelector``, for reads."""

    def __init__(self) -> None:
        self._keys: dict[UnixSocket, selectors.SelectorKey] = {}
        self._poll = Poll()

    def register(self, each: UnixSocket, events: int, data: Any = None) -> None:
        """Wait for ``each``, too."""
        self._keys[each] = selectors.SelectorKey(each, id(each), events, data)  # type: ignore[arg-type]
        self._poll.register(each)

    def unregister(self, each: UnixSocket) -> None:
        """Wait for ``each`` no more. Raises KeyError."""
        del self._keys[each]
        self._poll.unregister(each)

    def select(self, seconds: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Those that may be read; none: the time is over."""
        ready = self._poll.poll(None if seconds is None else seconds * 1000)
        return [(self._keys[each], selectors.EVENT_READ) for each, _ in ready]

    def close(self) -> None:
        """Wait for none any more."""
        self._keys.clear()
        self._poll = Poll()


def _joined(one: UnixSocket, other: UnixSocket) -> tuple[UnixSocket, UnixSocket]:
    one.peer, other.peer = other, one
    return one, other


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
