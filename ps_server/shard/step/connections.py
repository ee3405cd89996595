"""The open streams of one model: one of each worker, and its transport."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ps_protocol.cluster.transport import Transport
from ps_protocol.errors import Fenced, PsError, Unavailable
from ps_protocol.logs import EventLogger
from ps_server.consistency import WorkerKey

logger = EventLogger(__name__)


class Connections:
    """Used on the shard's event loop."""

    def __init__(self, model: str) -> None:
        self._model = model
        #: By worker.
        self.transports: dict[WorkerKey, Transport] = {}
        #: The newest open stream of each worker.
        self._streams: dict[WorkerKey, object] = {}
        #: By rank, or by incarnation for uploads: its newest call, and the future that ends it.
        self._places: dict[int, tuple[WorkerKey, asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        """Workers with an open stream."""
        return len(self._streams)

    @contextmanager
    def place(self, worker: WorkerKey, key: int | None = None) -> Iterator[asyncio.Future[None]]:
        """While a call of ``worker`` is served of which there is one for each ``key``: by default for each rank.

        What is yielded raises once it must end: Unavailable when the worker has opened another, Fenced when it is no
        member any more.
        """
        key = worker.rank if key is None else key
        self._end(key, Unavailable(f"{worker} has begun another call of this kind on model '{self._model}'"))
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._places[key] = worker, ended
        try:
            yield ended
        finally:
            if ended.done():
                ended.exception()  # seen: it may not be awaited
            ended.cancel()
            if self._places.get(key) == (worker, ended):
                del self._places[key]

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
                        remedy="its lease ended or a newer process took its rank: start the worker again",
                    ),
                )

    def _end(self, rank: int, error: PsError) -> None:
        held = self._places.pop(rank, None)
        if held is not None and not held[1].done():
            held[1].set_exception(error)

    @contextmanager
    def open(self, worker: WorkerKey, transport: Transport) -> Iterator[None]:
        """While a stream of ``worker`` is open."""
        if transport != self.transports.get(worker):
            logger.info("transport", "model '%s': %s uses %s", self._model, worker, transport.value)
        self.transports[worker] = transport
        stream = self._streams[worker] = object()
        try:
            yield
        finally:
            # A worker that lost its stream may have opened the next before this one was seen to end.
            if self._streams.get(worker) is stream:
                del self._streams[worker], self.transports[worker]
