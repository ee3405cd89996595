"""Transports of step streams on a worker: one interface over gRPC, sockets and shared memory."""

from ps_worker.transport.base import ClientTransport, Link
from ps_worker.transport.negotiate import open_stream

__all__ = ["ClientTransport", "Link", "open_stream"]
