"""The interface of every transport of a step stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ps_protocol.cluster.answers import Answer
from ps_protocol.cluster.requests import LookupHeader, PushHeader
from ps_protocol.cluster.transport import Transport
from ps_protocol.model.layout import Layout, Range
from ps_protocol.security.security import OFF, Security
from ps_protocol.wire.shared_memory import KeptMappings, SharedMemory
from ps_worker.transport.replies import Peer, Place


@dataclass(frozen=True, slots=True)
class Link:
    """What a transport knows of its stream."""

    peer: Peer
    #: The positions of the model's slices in the shard's region.
    layout: Layout
    #: Called with the reason when an answer takes long.
    on_wait: Callable[[str], None]
    security: Security = OFF
    #: Memory of streams that have ended, which the shard may give this one again.
    memory: KeptMappings = field(default_factory=KeptMappings)
    #: How many memories for gradients to ask for, where the shard shares them.
    segments: int = 1


class ClientTransport(Protocol):
    """One open stream to a shard. Used by the training thread.

    Sending neither waits nor fails: ``receive`` reports a broken stream.
    """

    transport: Transport

    @property
    def in_clear(self) -> bool:
        """Whether payloads can be read on the network although this process uses TLS."""
        ...

    @property
    def alive(self) -> bool:
        """Whether the stream has not ended, as far as this side knows."""
        ...

    @property
    def gradients(self) -> Sequence[SharedMemory]:
        """Memories that the shard applies gradients from, ``segments`` of ``Link``; none where a push carries them."""
        ...

    def keep_memory(self) -> None:
        """Before ``close``: the shard's memory that is mapped here may be given to the next stream of ``Link``."""
        ...

    def push(self, header: PushHeader, payload: Sequence[memoryview], rows: Sequence[memoryview] = ()) -> None:
        """Begin one push; ``payload`` and ``rows`` must not change until its result has been received.

        ``rows`` are sent also where the shard maps ``gradients``; the number in ``header``, from 1, says in which the
        gradients are.
        """
        ...

    def look_up(self, header: LookupHeader, ids: Sequence[memoryview]) -> None:
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
        """Tell the shard that this worker enters the barrier that ends ``phase``."""
        ...

    def receive(self, place: Place) -> Answer | None:
        """The answer to the oldest push, fetch or lookup without one, its payload in place. Raises PsError.

        None: the shard says that it waits, as it does every few seconds. An exception, Ctrl-C for one, ends the stream.
        """
        ...

    def cancel(self) -> None:
        """From any thread: end the stream, so that ``receive`` raises Unavailable. ``close`` comes later."""
        ...

    def close(self) -> None:
        """End the stream now; it reads no payload after this call. Safe to repeat."""
        ...
