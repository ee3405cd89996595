"""Polls the coordinator for the status of the job, in another thread than that of the processes."""

from __future__ import annotations

import threading

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import ClusterStatus
from ps_protocol.errors import PsError
from ps_protocol.security.security import OFF, Security

CALL_SECONDS = 2.0


class ProgressPoller:
    """A daemon thread that keeps the newest status. Any thread may read ``latest``; a coordinator that does not
    answer leaves the last one standing.
    """

    def __init__(self, address: str, interval_seconds: float, security: Security = OFF) -> None:
        self._client = CoordinatorClient(address, security)
        self._interval_seconds = interval_seconds
        self._closed = threading.Event()
        #: The last answer, None before the first.
        self.latest: ClusterStatus | None = None
        self._thread = threading.Thread(target=self._poll, name="ps-progress", daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        while not self._closed.wait(self._interval_seconds):
            try:
                self.latest = self._client.get_status(CALL_SECONDS)
            except PsError:
                continue

    def close(self) -> None:
        """End the thread; a call in progress is cancelled."""
        self._closed.set()
        self._client.close()
        self._thread.join()
