"""What the coordinator asks the program for that starts workers, such as ps-run."""

from __future__ import annotations

import queue
import threading

from ps_protocol.client.connection import CoordinatorConnection
from ps_protocol.errors import PsError, Unavailable
from ps_protocol.security.security import OFF, Security
from ps_protocol.v1 import coordinator_pb2 as pb

ASK_SECONDS = 10.0
"""Interval of calls. A request is made 30 s after a worker was lost, and comes again."""

UNANSWERED = 30
"""Calls in a row, from the first on, of which nobody answered one: then that is told."""

JOINING_SECONDS = 300.0
"""A worker that was started later may still be about to join, on a busy machine: the coordinator asks again."""

_CALL_SECONDS = 5.0


class WorkerRequests:
    """A daemon thread that asks a coordinator with ``--engine launcher``. One other thread calls ``take``."""

    def __init__(self, address: str, security: Security = OFF, interval_seconds: float = ASK_SECONDS) -> None:
        """``address``: host:port of the coordinator, which need not serve yet."""
        self._connection = CoordinatorConnection(address, security)
        self._interval_seconds = interval_seconds
        self._closed = threading.Event()
        self._found: queue.SimpleQueue[tuple[int, ...] | PsError] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._ask, name="ps-worker-requests", daemon=True)
        self._thread.start()

    def take(self) -> tuple[int, ...]:
        """The ranks of a request that came since the last time; empty: none came.

        Raises PsError when the coordinator refuses to answer, or was never reached; once until it does answer.
        """
        try:
            found = self._found.get_nowait()
        except queue.Empty:
            return ()
        if isinstance(found, PsError):
            raise found
        return found

    def close(self) -> None:
        """End the thread; a call in progress is cancelled."""
        self._closed.set()
        self._connection.close()
        self._thread.join()

    def _ask(self) -> None:
        #: The last number; it starts over with another coordinator process.
        seen, unanswered, told = 0, 0, False
        while not self._closed.wait(self._interval_seconds):
            try:
                answer = self._connection.once("GetWorkerRequest", pb.GetWorkerRequestRequest(), _CALL_SECONDS)
            except PsError as error:
                unanswered += isinstance(error, Unavailable)
                # One that has answered will be there again.
                if not told and (not isinstance(error, Unavailable) or unanswered == UNANSWERED):
                    told = True
                    self._found.put(error)
                continue
            unanswered, told = UNANSWERED, False
            if answer.number not in (0, seen):
                self._found.put(tuple(answer.ranks))
            seen = answer.number
