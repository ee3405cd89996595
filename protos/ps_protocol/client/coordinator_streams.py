"""Streams of answers from the coordinator: views of the cluster, and the progress of slices that move."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import grpc

from ps_protocol.cluster.view import ClusterView, MoveProgress
from ps_protocol.rpc.client_errors import translate
from ps_protocol.wire.convert import cluster as convert


class ViewStream:
    """Views as they arrive from one Watch call. Iterated by one thread; any thread may cancel."""

    def __init__(self, call: Any, peer: str) -> None:
        self._call = call
        self._peer = peer

    def __iter__(self) -> Iterator[ClusterView]:
        """Yields each new view. Raises Unavailable when the stream breaks or is cancelled, and what
        ``changed_view_from_pb`` raises.
        """
        view = ClusterView()
        try:
            for message in self._call:
                view = convert.changed_view_from_pb(message, view)
                yield view
        except grpc.RpcError as error:
            raise translate(error, self._peer) from error

    def cancel(self) -> None:
        """End the iteration from another thread."""
        self._call.cancel()


class MoveStream:
    """Progress of one Reshard call. Used by one thread, which a signal may interrupt while it waits.

    A signal handler that raises inside gRPC, as that of Ctrl-C does, may leave a lock held; so another thread reads.
    """

    def __init__(self, call: Any, peer: str) -> None:
        self._call = call
        self._peer = peer
        self._arrived: queue.SimpleQueue[MoveProgress | grpc.RpcError | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="ps-moves", daemon=True).start()

    def __iter__(self) -> Iterator[MoveProgress]:
        """Yields at the start and after each batch, until all has been moved. Raises PsError."""
        while (arrived := self._arrived.get()) is not None:
            if isinstance(arrived, grpc.RpcError):
                raise translate(arrived, self._peer) from arrived
            yield arrived

    def cancel(self) -> None:
        """Begin no other batch: the one under way is completed or undone, and slices that have moved stay."""
        self._call.cancel()

    def _read(self) -> None:
        try:
            for message in self._call:
                self._arrived.put(convert.progress_from_pb(message))
            self._arrived.put(None)
        except grpc.RpcError as error:
            self._arrived.put(error)
