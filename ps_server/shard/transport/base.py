"""The interface of the transports of a step stream, and what all of them do alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ps_protocol.cluster.answers import Answer, RowsAnswer, StepAnswer, StepReply
from ps_protocol.cluster.requests import StepRequest
from ps_protocol.cluster.transport import Transport
from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Range
from ps_server.state.region import Region

AT_ONCE_BYTES = 1 << 20
"""Up to this size a payload is moved on the event loop: that takes less time than handing it to a thread."""


class AtOnce(Protocol):
    """Deals with a message where its bytes are read, in a callback of the event loop."""

    def begin(self, message: StepRequest) -> Sequence[memoryview] | None:
        """Where the payload behind ``message`` goes; empty: there is none, or it has been taken out of the message.

        None, with nothing done: the message is left to a task. Raises InvalidRequest.
        """
        ...

    def end(self) -> bool:
        """The payload of the last ``begin`` is there. False: something has to be waited for, so a task goes on."""
        ...


class ServerTransport(Protocol):
    """One stream's messages both ways. Used on the event loop by one reader and one writer at a time.

    Raises ConnectionError when the worker is gone or stalls, InvalidRequest when it breaks the protocol.
    """

    kind: Transport

    async def receive(self, at_once: AtOnce | None = None) -> StepRequest | None:
        """The next message that is no chunk; None once the worker has sent its last.

        ``at_once`` is given messages that came whole, and those that it deals with are not returned. Only a transport
        that has ``send_at_once`` calls it. What it raises is raised here. A message that it has begun and not dealt
        with is returned, too: its payload has been received.
        """
        ...

    async def receive_payload(self, pieces: Sequence[memoryview]) -> None:
        """The payload behind the last message, into ``pieces``. No byte is written to them after it has returned."""
        ...

    def gradients(self, segment: int) -> Region:
        """The region that the worker wrote its gradients to. Raises InvalidRequest when there is none."""
        ...

    async def send(self, reply: StepReply) -> None:
        """Send one message without a payload."""
        ...

    def send_at_once(self, answer: StepAnswer, region: Region, ranges: Sequence[Range]) -> bool:
        """As ``send_parameters``, while nothing else is being sent; the region is not read any more after it.

        Whether all is sent. If not, the rest is copied, and ``send_rest`` is to be called before anything else is sent.
        """
        ...

    async def send_rest(self) -> None:
        """Send what ``send_at_once`` has left."""
        ...

    async def send_parameters(self, answer: StepAnswer, region: Region, ranges: Sequence[Range]) -> None:
        """Send ``answer`` and ``ranges`` of ``region``; returns when the region is not read any more."""
        ...

    async def send_payload(self, answer: Answer, payload: Sequence[memoryview]) -> None:
        """Send ``answer`` and ``payload``; returns when the payload is not read any more."""
        ...

    def pushed_rows(self, size: int) -> memoryview:
        """Rows of a push in shared memory. Raises InvalidRequest when there is none, or not so much."""
        ...

    def room(self, size: int) -> memoryview | None:
        """Memory shared with the worker for the rows it asked for; free to be written."""
        ...

    async def send_rows(self, rows: RowsAnswer, values: memoryview, *, in_room: bool) -> None:
        """Send ``rows`` and their ``values``, which are ``in_room``; returns when they are not read any more."""
        ...

    def released(self) -> None:
        """The worker has read what was lent to it last."""
        ...


def no_segments(transport: Transport) -> InvalidRequest:
    """A worker named shared memory on a stream that has none."""
    return InvalidRequest(
        "a push names shared memory that this stream does not have",
        expected="a payload in the push, or behind it",
        actual=transport.value,
        remedy="attach to the shm side channel first",
    )
