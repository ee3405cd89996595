"""What the coordinator tells the program that starts processes, such as ps-run: which to end and to start again."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from dataclasses import dataclass

from ps_protocol import times
from ps_protocol.client.connection import CoordinatorConnection
from ps_protocol.cluster.scaling import ScaleOrder
from ps_protocol.cluster.view import Role
from ps_protocol.errors import PsError, Unavailable
from ps_protocol.security.security import OFF, Security
from ps_protocol.text import printable
from ps_protocol.v1 import coordinator_pb2 as pb
from ps_protocol.wire.convert.cluster import role_from_pb
from ps_protocol.wire.convert.scaling import order_from_pb

UNANSWERED = 150
"""Calls in a row, from the first on, of which nobody answered one: then that is told."""


@dataclass(frozen=True, slots=True)
class LostServer:
    """A shard or standby whose lease has ended, and whose process may hang."""

    role: Role
    index: int
    host: str
    #: Number of its process there.
    pid: int
    #: How its lease ended, in words.
    how: str
    #: Another process has its place now.
    replaced: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the coordinator has told since the last time."""

    #: Ranks whose workers were lost and are to be started again.
    ranks: tuple[int, ...] = ()
    #: Told with every answer, until they come back or others are lost in their places.
    lost: tuple[LostServer, ...] = ()


class WorkerRequests:
    """A daemon thread that asks a coordinator. One other thread calls ``take``.

    Workers are asked for by a coordinator with ``--engine launcher``.
    """

    def __init__(self, address: str, security: Security = OFF, interval_seconds: float = times.ASK_SECONDS) -> None:
        """``address``: host:port of the coordinator, which need not serve yet."""
        self._connection = CoordinatorConnection(address, security)
        self._interval_seconds = interval_seconds
        self._closed = threading.Event()
        self._found: queue.SimpleQueue[Wanted | PsError] = queue.SimpleQueue()
        #: What is to run, as answers told.
        self._orders: queue.SimpleQueue[ScaleOrder] = queue.SimpleQueue()
        #: Ask now.
        self._now = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="ps-worker-requests", daemon=True)
        self._thread.start()

    def take(self) -> Wanted:
        """What came since the last time.

        Raises PsError when the coordinator refuses to answer, or was never reached; once until it does answer.
        """
        try:
            found = self._found.get_nowait()
        except queue.Empty:
            return Wanted()
        if isinstance(found, PsError):
            raise found
        return found

    def take_order(self) -> ScaleOrder | None:
        """What is to run, where that was told since the last call."""
        order = None
        with suppress(queue.Empty):
            while True:
                order = self._orders.get_nowait()
        return order

    def ask_now(self) -> None:
        """Do not wait for the end of the interval."""
        self._now.set()

    def close(self) -> None:
        """End the thread; a call in progress is cancelled."""
        self._closed.set()
        self._now.set()
        self._connection.close()
        self._thread.join()

    def _wait(self) -> bool:
        """Wait until the next call is due; whether there is none any more."""
        self._now.wait(self._interval_seconds)
        self._now.clear()
        return self._closed.is_set()

    def _ask(self) -> None:
        #: The last number; it starts over with another coordinator process.
        seen, unanswered, told = 0, 0, False
        while not self._wait():
            try:
                answer = self._connection.once(
                    "GetWorkerRequest", pb.GetWorkerRequestRequest(), times.REPEATED_CALL_SECONDS
                )
                lost = tuple(map(_lost_from_pb, answer.lost))
            except PsError as error:
                unanswered += isinstance(error, Unavailable)
                # One that has answered will be there again.
                if not told and (not isinstance(error, Unavailable) or unanswered == UNANSWERED):
                    told = True
                    self._found.put(error)
                continue
            unanswered, told = UNANSWERED, False
            self._orders.put(order_from_pb(answer.scale))
            ranks = tuple(answer.ranks) if answer.number not in (0, seen) else ()
            if ranks or lost:
                self._found.put(Wanted(ranks, lost))
            seen = answer.number


def _lost_from_pb(lost: pb.LostServer) -> LostServer:
    return LostServer(role_from_pb(lost.role), lost.index, lost.host, lost.pid, printable(lost.how), lost.replaced)
