"""Limits the connections of a gRPC server: in all, of one host, and those that have not made a call.

gRPC limits connections in all, and the time of their handshakes, and reports neither. Here they are named and counted.
They are found where the kernel lists them, since gRPC accepts them by itself. Linux only.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from ps_protocol.logs import EventLogger
from ps_server.limits import (
    CONNECTIONS,
    HANDSHAKE_TIME,
    HANDSHAKES,
    PEER_CONNECTIONS,
    LimitCounts,
    ServerLimits,
)
from ps_server.serving.log_limit import LogLimit

logger = EventLogger(__name__)
logging.getLogger(__name__).addFilter(LogLimit())

LOOK_SECONDS = 1.0

_LOOK_SHARE = 100
"""The pause after a look is at least so many times as long as the CPU time of the look."""

LISTS = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_DESCRIPTORS = "/proc/self/fd"
_ESTABLISHED = "01"
_WORD_BYTES = 4

Endpoint = tuple[str, int]
"""Address and port of the other side."""


@dataclass(frozen=True, slots=True)
class Connection:
    """One that is established and accepted."""

    peer: Endpoint
    #: Of the socket; a later one is higher most of the time, and no two of a moment are the same.
    inode: int


class ConnectionBook:
    """Decides which connections are too many. Pure: it is told what there is."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        #: How long each connection has been seen, in the order in which they came.
        self._ages: dict[Connection, float] = {}

    def look(
        self, connections: Sequence[Connection], called: Container[Endpoint], passed_seconds: float
    ) -> list[tuple[Connection, str]]:
        """The connections to close, and the limit of each. ``called``: have made a call; ``passed_seconds``: since the
        last look, without times in which this process stood still.
        """
        limits, present = self._limits, set(connections)
        self._ages = {each: age + passed_seconds for each, age in self._ages.items() if each in present}
        for each in sorted(present - self._ages.keys(), key=lambda new: (new.peer not in called, new.inode)):
            self._ages[each] = 0.0
        closing: dict[Connection, str] = {}
        silent = [each for each in self._ages if each.peer not in called]
        for each in silent:
            if self._ages[each] >= limits.handshake_seconds:
                closing[each] = HANDSHAKE_TIME
        waiting = [each for each in silent if each not in closing]
        # The oldest has had the most time.
        closing |= dict.fromkeys(waiting[: max(0, len(waiting) - limits.max_handshakes)], HANDSHAKES)
        hosts: Counter[str] = Counter()
        total = 0
        for each in self._ages:
            if each in closing:
                continue
            if hosts[each.peer[0]] >= limits.max_peer_connections:
                closing[each] = PEER_CONNECTIONS
            elif total >= limits.max_connections:
                closing[each] = CONNECTIONS
            else:
                hosts[each.peer[0]] += 1
                total += 1
        return list(closing.items())


class ConnectionGuard:
    """Looks at the connections of one server, and closes what its book says. On the server's event loop."""

    def __init__(self, limits: ServerLimits, counts: LimitCounts, clock: Callable[[], float] = time.monotonic) -> None:
        """``run`` begins."""
        self._book = ConnectionBook(limits)
        self._counts = counts
        self._clock = clock
        self._called: set[Endpoint] = set()
        self._open = 0
        #: A peer has a name that is not understood: then nothing is known of who has made a call.
        self._all_called = False
        #: Of other processes that have the same port on another address.
        self._foreign: set[Connection] = set()
        counts.hold(CONNECTIONS, limits.max_connections, lambda: self._open)

    def note(self, peer: str) -> None:
        """``peer``, in gRPC's words, makes a call."""
        endpoint = endpoint_of(peer)
        if endpoint is None:
            self._all_called = True
        else:
            self._called.add(endpoint)

    async def run(self, port: int) -> None:
        """Look again and again, until cancelled."""
        last = self._clock()
        pause = LOOK_SECONDS
        while True:
            await asyncio.sleep(pause)
            now = self._clock()
            try:
                cost_seconds = await self._look(port, min(now - last, 2 * pause))
            except OSError as error:
                logger.warning("server.unguarded", "connections of one host are not limited here: %s", error)
                return
            last = now
            pause = max(LOOK_SECONDS, _LOOK_SHARE * cost_seconds)

    async def _look(self, port: int, passed_seconds: float) -> float:
        """Returns the seconds of CPU that the list took."""
        before = set(self._called)
        every, cost_seconds = await asyncio.to_thread(_listed, port)
        self._foreign.intersection_update(every)
        found = [each for each in every if each not in self._foreign]
        # What has called before the look, and is not there in it, has ended.
        self._called -= before - {each.peer for each in found}
        called = {each.peer for each in found} if self._all_called else self._called
        self._open = len(found)
        for connection, limit in self._book.look(found, called, passed_seconds):
            if await asyncio.to_thread(end, connection):
                self._counts.add(limit)
                logger.warning("caller.refused", "closed a connection of %s: %s", connection.peer[0], limit)
            else:
                self._foreign.add(connection)
        return cost_seconds


def _listed(port: int) -> tuple[list[Connection], float]:
    begin = time.thread_time()
    return connections_to(port), time.thread_time() - begin


def connections_to(port: int) -> list[Connection]:
    """Of every process that has this port; those of others are not found by ``end``. Raises OSError without /proc."""
    found, marker = [], f":{port:04X} "
    for path in LISTS:
        if path is not LISTS[0] and not path.exists():
            continue  # a machine without IPv6
        found += [each for line in path.read_text().splitlines() if marker in line and (each := _parse(line, port))]
    return found


def _parse(line: str, port: int) -> Connection | None:
    fields = line.split()
    address, _, local = fields[1].partition(":")
    if fields[3] != _ESTABLISHED or int(local, 16) != port:
        return None
    address, _, other = fields[2].partition(":")
    inode = int(fields[9])
    # 0: it waits to be accepted.
    return Connection((_address(address), int(other, 16)), inode) if inode else None


def _address(text: str) -> str:
    """The kernel prints words of four bytes in the order of the machine."""
    data = bytes.fromhex(text)
    if sys.byteorder == "little":
        data = b"".join(data[at : at + _WORD_BYTES][::-1] for at in range(0, len(data), _WORD_BYTES))
    return _plain(ipaddress.ip_address(data))


def _plain(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def endpoint_of(peer: str) -> Endpoint | None:
    """The endpoint in gRPC's name of a peer: ipv4:10.0.0.1:4711, ipv6:%5B::1%5D:4711. None for another form."""
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    try:
        return _plain(ipaddress.ip_address(host.strip("[]").partition("%")[0])), int(port)
    except ValueError:
        return None


def end(connection: Connection) -> bool:
    """End ``connection``: both sides find it closed. False when it is none of this process, or none any more."""
    name = f"socket:[{connection.inode}]"
    for descriptor in _sockets_named(name):
        with suppress(OSError):
            # A copy: the number may be closed and used again meanwhile.
            copy = os.dup(descriptor)
            with socket.socket(fileno=copy) as held:
                if os.readlink(f"{_DESCRIPTORS}/{copy}") == name:  # noqa: PTH115 -- called for thousands
                    held.shutdown(socket.SHUT_RDWR)
                    return True
    return False


def _sockets_named(name: str) -> Iterator[int]:
    for entry in os.listdir(_DESCRIPTORS):  # noqa: PTH208 -- called for thousands
        with suppress(OSError):  # closed meanwhile
            if os.readlink(f"{_DESCRIPTORS}/{entry}") == name:  # noqa: PTH115
                yield int(entry)
