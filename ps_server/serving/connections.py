"""Limits the connections of a gRPC server: in all, of one host, and those that have not made a call.

gRPC limits connections in all, and the time of their handshakes, and tells nobody. Here they are named and counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Container, Sequence

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
from ps_server.serving.own_sockets import Connection, Endpoint, connections_to, end, endpoint_of

logger = EventLogger(__name__)
logging.getLogger(__name__).addFilter(LogLimit())

LOOK_SECONDS = 1.0

_LOOK_SHARE = 100
"""The pause after a look is at least so many times as long as the CPU time of the look."""


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
