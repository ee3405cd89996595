"""Streams of answers from the coordinator: views of the cluster, and the progress of what takes its time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, Generic, TypeVar

import grpc

from ps_protocol import times
from ps_protocol.cluster.scaling import ScaleProgress
from ps_protocol.cluster.view import ClusterView, MoveProgress
from ps_protocol.errors import NotReady, Unavailable
from ps_protocol.rpc.client_errors import translate
from ps_protocol.wire.convert import cluster as convert
from ps_protocol.wire.convert.cluster import SCALE_PROGRESS

T = TypeVar("T")


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


class ProgressStream(Generic[T]):
    """Progress of one call. Used by one thread, which a signal may interrupt while it waits.

    A signal handler that raises inside gRPC, as that of Ctrl-C does, may leave a lock held; so another thread reads.
    """

    def __init__(self, call: Any, peer: str, from_pb: Callable[[Any], T]) -> None:
        self._call = call
        self._peer = peer
        self._from_pb = from_pb
        self._arrived: queue.SimpleQueue[T | grpc.RpcError | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="ps-progress", daemon=True).start()

    def __iter__(self) -> Iterator[T]:
        """Yields until the call has ended. Raises PsError."""
        while (arrived := self.next()) is not None:
            yield arrived

    def next(self, timeout_seconds: float | None = None) -> T | None:
        """What comes next; None at the end. Raises queue.Empty where nothing comes in time, and PsError."""
        arrived = self._arrived.get(timeout=timeout_seconds)
        if isinstance(arrived, grpc.RpcError):
            raise translate(arrived, self._peer) from arrived
        return arrived

    def cancel(self) -> None:
        """End the call."""
        self._call.cancel()

    def _read(self) -> None:
        try:
            for message in self._call:
                self._arrived.put(self._from_pb(message))
            self._arrived.put(None)
        except grpc.RpcError as error:
            self._arrived.put(error)


class MoveStream(ProgressStream[MoveProgress]):
    """Progress of one Reshard call: at the start and after each batch, until all has been moved.

    When it is cancelled, no other batch begins: the one under way is completed or undone, and what has moved stays.
    """

    def __init__(self, call: Any, peer: str) -> None:
        super().__init__(call, peer, convert.MOVE_PROGRESS.from_pb)


class ScaleStream:
    """What a job waits for until it has as many workers and shards as asked for. As ``ProgressStream``.

    A coordinator that is lost meanwhile is asked again, for a minute: it keeps what is wanted.
    """

    def __init__(self, call: Callable[[], Any], peer: str, timeout_seconds: float | None) -> None:
        """``call`` begins the call. ``timeout_seconds``: for all of it; None: as long as it takes."""
        self._call, self._peer = call, peer
        self._timeout_seconds = timeout_seconds

    def __iter__(self) -> Generator[ScaleProgress, None, None]:
        """Yields whenever it changes, and at last with ``done``. Raises NotReady when it is not so in time, PsError."""
        begin = heard = time.monotonic()
        text = ""
        while True:
            stream = ProgressStream(self._call(), self._peer, SCALE_PROGRESS.from_pb)
            try:
                # What is asked for is wanted once the coordinator has answered.
                while (progress := stream.next(self._left(begin) if text else times.SHARD_CALL_SECONDS)) is not None:
                    heard, text = time.monotonic(), progress.text
                    yield progress
                    if progress.done:
                        return
                return
            except queue.Empty:
                if not text:
                    raise Unavailable(
                        f"{self._peer} has not answered for {times.SHARD_CALL_SECONDS:g} s, and may not know "
                        "what was asked for",
                        remedy="scale again",
                    ) from None
                raise NotReady(
                    f"the job is not scaled after {self._timeout_seconds:g} s: {text}",
                    remedy="it stays wanted: look at psctl status, or scale again to wait on",
                ) from None
            except Unavailable:
                if time.monotonic() - heard > times.PATIENCE_SECONDS or self._left(begin) == 0.0:
                    raise
                time.sleep(times.REWATCH_SECONDS)
            finally:
                stream.cancel()

    def _left(self, begin: float) -> float | None:
        return None if self._timeout_seconds is None else max(0.0, begin + self._timeout_seconds - time.monotonic())
