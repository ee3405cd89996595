"""How the open streams of one model travel."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ps_protocol import convert
from ps_protocol.v1 import common_pb2
from ps_server.consistency import WorkerKey

logger = logging.getLogger(__name__)


class Travels:
    """Used on the shard's event loop."""

    def __init__(self, model: str) -> None:
        self._model = model
        #: By worker.
        self.transports: dict[WorkerKey, common_pb2.Transport] = {}
        #: The newest open stream of each worker.
        self._streams: dict[WorkerKey, object] = {}

    def __len__(self) -> int:
        """Workers with an open stream."""
        return len(self._streams)

    @contextmanager
    def open(self, worker: WorkerKey, transport: common_pb2.Transport) -> Iterator[None]:
        """While a stream of ``worker`` is open."""
        if transport != self.transports.get(worker):
            logger.info("model '%s': %s travels over %s", self._model, worker, convert.transport_name(transport))
        self.transports[worker] = transport
        stream = self._streams[worker] = object()
        try:
            yield
        finally:
            # A worker that lost its stream may have opened the next before this one was seen to end.
            if self._streams.get(worker) is stream:
                del self._streams[worker], self.transports[worker]
