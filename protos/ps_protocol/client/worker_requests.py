"""What the coordinator requests of the program that starts processes, such as ps-run."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from ps_protocol import times
from ps_protocol.client.connection import CoordinatorConnection
from ps_protocol.cluster.scaling import ScaleOrder
from ps_protocol.cluster.view import Role
from ps_protocol.errors import PsError, Unavailable
from ps_protocol.security.security import OFF, Security
from ps_protocol.text import printable
from ps_protocol.v1 import coordinator_pb2 as pb
from ps_protocol.wire.convert.cluster import SCALE_ORDER, role_from_pb

UNANSWERED = 150
"""After so many calls, from the first on, without an answer, that is an error."""


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
    """What the coordinator has requested since the last time."""

    #: Ranks whose workers were lost and are to be started again.
    ranks: tuple[int, ...] = ()
    #: In every answer, until they come back or others are lost in their places.
    lost: tuple[LostServer, ...] = ()
    #: How many workers and shards are to run; None: no answer came.
    order: ScaleOrder | None = None
    #: The coordinator refuses to answer, or was never reached. There once, until it does answer.
    error: PsError | None = None


class WorkerRequests:
    """A daemon thread that asks a coordinator. One other thread calls ``take``.

    A coordinator with ``--engine launcher`` requests lost workers here.
    """

    def __init__(self, address: str, security: Security = OFF, interval_seconds: float = times.ASK_SECONDS) -> None:
        """``address``: host:port of the coordinator, which need not serve yet."""
        self._connection = CoordinatorConnection(address, security)
        self._interval_seconds = interval_seconds
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._found = Wanted()
        #: Ask now.
        self._now = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="ps-worker-requests", daemon=True)
        self._thread.start()

    def take(self) -> Wanted:
        """What came since the last time; of several answers the newest."""
        with self._lock:
            found, self._found = self._found, Wanted()
        return found

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
        seen, unanswered, failed = 0, 0, False
        while not self._wait():
            try:
                answer = self._connection.once(
                    "GetWorkerRequest", pb.GetWorkerRequestRequest(), times.REPEATED_CALL_SECONDS
                )
                lost, order = tuple(map(_lost_from_pb, answer.lost)), SCALE_ORDER.from_pb(answer.scale)
            except PsError as error:
                unanswered += isinstance(error, Unavailable)
                # One that has answered will be there again.
                if not failed and (not isinstance(error, Unavailable) or unanswered == UNANSWERED):
                    failed = True
                    with self._lock:
                        self._found = replace(self._found, error=error)
                continue
            unanswered, failed = UNANSWERED, False
            ranks = tuple(answer.ranks) if answer.number not in (0, seen) else ()
            seen = answer.number
            with self._lock:
                ranks = ranks or self._found.ranks
                self._found = replace(self._found, ranks=ranks, lost=lost, order=order)


def _lost_from_pb(lost: pb.LostServer) -> LostServer:
    return LostServer(role_from_pb(lost.role), lost.index, lost.host, lost.pid, printable(lost.how), lost.replaced)
