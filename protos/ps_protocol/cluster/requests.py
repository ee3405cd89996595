"""What a worker sends on a step stream, without the payloads that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ps_protocol import PROTOCOL_VERSION
from ps_protocol.cluster.transport import Transport
from ps_protocol.model.spec import Options
from ps_protocol.model.tables import RowCount, RowOptions
from ps_protocol.wire.formats import RAW, Wire


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """Opens a stream."""

    model: str = ""
    #: Of the worker's shard map.
    epoch: int = 0
    #: Rank and incarnation.
    worker: tuple[int, int] = (0, 0)
    membership_revision: int = 0
    phase: int = 0
    #: Of a worker that has made steps; None: it has just begun.
    clock: int | None = None
    wire: Wire = RAW
    #: The highest sequence that a shard has reported to the worker as applied.
    acknowledged: int = 0
    torch_version: str = ""
    #: The worker keeps what comes on the stream: answers may leave out what has not changed.
    keeps_slices: bool = False
    #: Side channels that the worker would use, best first; None: one that this version does not know.
    transports: Sequence[Transport | None] = ()
    #: The last sequence that the shard has answered: pushes up to here do not come again.
    answered: int = 0
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class AttachRequest:
    """The first message on a side channel."""

    token: bytes
    #: shm: how many gradient segments the worker wants; 0 is 1.
    segments: int = 0


@dataclass(frozen=True, slots=True)
class ConfirmRequest:
    """The worker uses the side channel from now on."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """What another worker than the one that sends it has in a combined push."""

    #: Rank and incarnation.
    worker: tuple[int, int]
    sequence: int
    phase: int
    clock: int
    pulled_version: int
    #: The worker skipped this step: the payload has nothing of it.
    skipped: bool = False


@dataclass(slots=True)
class PushHeader:
    """One push. The transport of the worker fills in ``payload``, ``segment`` and ``rows_in_room``."""

    sequence: int = 0
    phase: int = 0
    clock: int = 0
    pulled_version: int = 0
    #: Indexes of slices without a gradient.
    absent: Sequence[int] = ()
    #: Per parameter group, and per table; empty: as in the last push of the stream.
    options: Sequence[Options] = ()
    table_options: Sequence[RowOptions] = ()
    with_buffers: bool = False
    #: The worker skipped this step: there is no payload.
    skipped: bool = False
    #: The worker has seen that all gradients are finite.
    finite: bool = False
    ahead: int = 0
    #: begin, end, begin, end, …: bytes of the region that came ahead.
    staged: Sequence[int] = ()
    tables: Sequence[RowCount] = ()
    #: W3C trace context of the worker's step; empty: the step is not traced.
    traceparent: str = ""
    #: sync: what the gradients weigh in the mean of their step; 0: 1.
    weight: float = 0.0
    #: Where gradients are clipped: the squared norm of the whole push, over all shards; None: they are not.
    squared_norm: float | None = None
    #: Of a combined push: its other workers, by rising rank. The payload is the weighted mean of all, ``weight``
    #: the sum of their weights.
    contributions: Sequence[Contribution] = ()
    #: The payload, where it is in the message.
    payload: bytes | memoryview = b""
    #: shm: number of the segment with the gradients; 0: the payload has them.
    segment: int = 0
    #: shm: ids and gradients of rows are in the memory for rows.
    rows_in_room: bool = False


@dataclass(slots=True)
class StageRequest:
    """Bytes [begin, end) of the next push's region, ahead of it; ``payload``: where it is in the message."""

    begin: int
    end: int
    payload: bytes | memoryview = b""


@dataclass(slots=True)
class LookupHeader:
    """Asks for rows; their ids are the payload. The transport of the worker fills in ``payload``."""

    number: int
    tables: Sequence[RowCount]
    #: Phase and clock of the push that the rows are for; None: as they are now.
    position: tuple[int, int] | None
    #: The payload, where it is in the message.
    payload: bytes | memoryview = b""


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """The newest parameters and buffers are wanted, whatever the mode."""


@dataclass(frozen=True, slots=True)
class ArriveRequest:
    """The worker enters the barrier that ends ``phase``."""

    phase: int


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    """shm: what was lent last has been read."""


@dataclass(frozen=True, slots=True)
class UnknownRequest:
    """A message that is none of the others; the name of its body, "None" where this version does not know it."""

    body: str


StepRequest = (
    OpenRequest
    | AttachRequest
    | ConfirmRequest
    | PushHeader
    | StageRequest
    | LookupHeader
    | FetchRequest
    | ArriveRequest
    | ReleaseRequest
    | UnknownRequest
)
