"""The messages of a gRPC call, received by a thread that signals may interrupt at any moment."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import grpc

from ps_protocol.interruptible import next_item

_AHEAD = 4
"""Messages that are read ahead."""


class CallMessages:
    """What a call receives, in order; used by one thread at a time.

    gRPC waits with a condition that every method of the call needs. A signal handler that raises there, as that of
    Ctrl-C does, may leave it locked; then the next method of the call waits for ever. Therefore a thread that receives
    no signals reads the call, and the caller waits for a queue.
    """

    def __init__(self, call: Any) -> None:
        self._arrived: queue.SimpleQueue[bytes | grpc.RpcError | None] = queue.SimpleQueue()
        self._wanted: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(_AHEAD):
            self._wanted.put(None)
        threading.Thread(target=_read, args=(call, self._wanted, self._arrived), name="incoming", daemon=True).start()
        wanted = self._wanted
        if not call.add_callback(lambda: wanted.put(None)):
            wanted.put(None)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        """The next message. Raises the call's RpcError when it has failed."""
        message = next_item(self._arrived)
        if isinstance(message, bytes):
            self._wanted.put(None)
            return message
        self._arrived.put(message)  # the end stays the end
        if message is None:
            raise StopIteration
        raise message


def _read(
    call: Iterator[bytes],
    wanted: queue.SimpleQueue[None],
    arrived: queue.SimpleQueue[bytes | grpc.RpcError | None],
) -> None:
    try:
        while True:
            wanted.get()
            arrived.put(next(call))
    except StopIteration:
        arrived.put(None)
    except grpc.RpcError as error:
        arrived.put(error)
