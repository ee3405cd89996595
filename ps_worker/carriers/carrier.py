"""The interface of every carrier: what a lane needs of its open stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ps_protocol.layout import Layout, Range
from ps_protocol.messages import INLINE_BYTES
from ps_protocol.segments import Segment
from ps_protocol.v1 import common_pb2
from ps_protocol.v1 import shard_pb2 as pb
from ps_worker.replies import Answer, Peer, Place


@dataclass(frozen=True, slots=True)
class Link:
    """What a carrier knows of its stream."""

    peer: Peer
    #: Where the bytes of the model's slices lie on the shard.
    layout: Layout
    #: Told why an answer takes its time.
    on_wait: Callable[[str], None]


def put_inline(header: pb.PushHeader | pb.Lookup, payload: Sequence[memoryview]) -> Sequence[memoryview]:
    """Put a small payload into ``header``; returns what has to be sent behind it."""
    if sum(map(len, payload)) > INLINE_BYTES:
        return payload
    header.payload = b"".join(payload)
    return ()


class Carrier(Protocol):
    """One open stream to a shard. Used by the training thread.

    Sending neither waits nor fails: a stream that broke says so when its answer is asked for.
    """

    transport: common_pb2.Transport

    @property
    def alive(self) -> bool:
        """Whether the stream has not ended, as far as this side knows."""
        ...

    @property
    def gradients(self) -> Segment | None:
        """Memory that the shard applies gradients from; None where a push carries them."""
        ...

    def push(self, header: pb.PushHeader, payload: Sequence[memoryview], rows: Sequence[memoryview] = ()) -> None:
        """Begin one push; ``payload`` and ``rows`` must not change until its result has been received.

        ``rows`` are sent also where the shard maps ``gradients``.
        """
        ...

    def look_up(self, header: pb.Lookup, ids: Sequence[memoryview]) -> None:
        """Ask for rows; ``ids`` must not change until they have come."""
        ...

    def stage(self, span: Range, piece: memoryview, ready: Callable[[], None]) -> None:
        """Send bytes ``span`` of the next push's region ahead; ``piece`` holds them once ``ready`` has returned.

        Where the shard maps ``gradients`` there is nothing to send.
        """
        ...

    def fetch(self) -> None:
        """Ask for the newest parameters and buffers."""
        ...

    def arrive(self, phase: int) -> None:
        """Send the news that this worker enters the barrier that ends ``phase``."""
        ...

    def receive(self, place: Place) -> Answer | None:
        """The answer to the oldest push, fetch or lookup without one, its payload in place. Raises PsError.

        None when the shard said instead that it waits, as it does every few seconds.

        A call that raises, or that Ctrl-C ends, ends the stream.
        """
        ...

    def cancel(self) -> None:
        """From any thread: end the stream, so that whoever receives gets Unavailable. ``close`` comes later."""
        ...

    def close(self) -> None:
        """End the stream now; afterwards it reads no payload any more. Safe to repeat."""
        ...
