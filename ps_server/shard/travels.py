"""The open streams of one model: one of each worker, and how it travels."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ps_protocol import convert
from ps_protocol.errors import Fenced, PsError, Unavailable
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
        #: By rank, whose newest stream it is, and how that is told that another takes its place.
        self._places: dict[int, tuple[WorkerKey, asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        """Workers with an open stream."""
        return len(self._streams)

    @contextmanager
    def place(self, worker: WorkerKey) -> Iterator[asyncio.Future[None]]:
        """While a step stream of ``worker`` is served; there is one of each rank.

        What is yielded raises once it must end: Unavailable when the worker has opened another, Fenced when it is no
        member any more.
        """
        self._end(worker.rank, Unavailable(f"{worker} has opened another stream of model '{self._model}'"))
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._places[worker.rank] = worker, ended
        try:
            yield ended
        finally:
            if ended.done():
                ended.exception()  # seen, should nobody have waited for it
            ended.cancel()
            if self._places.get(worker.rank) == (worker, ended):
                del self._places[worker.rank]

    def members(self, live: Mapping[int, int]) -> None:
        """End the streams of workers that are not ``live``, rank to incarnation."""
        for rank, (worker, _) in list(self._places.items()):
            if live.get(rank) != worker.incarnation:
                self._end(
                    rank,
                    Fenced(
                        f"{worker} is not a live member of the job",
                        expected="a live worker" if rank not in live else str(WorkerKey(rank, live[rank])),
                        actual=str(worker),
                        remedy="its lease ended or a newer process took its rank: start the worker again to join anew",
                    ),
                )

    def _end(self, rank: int, error: PsError) -> None:
        held = self._places.pop(rank, None)
        if held is not None and not held[1].done():
            held[1].set_exception(error)

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
