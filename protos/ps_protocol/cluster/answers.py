"""What a shard answers on a step stream, without the payloads that follow."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from ps_protocol.cluster.transport import Transport
from ps_protocol.errors import PsError
from ps_protocol.model.spec import OptionDifference


class Outcome(enum.IntEnum):
    """What a shard did with a push. A higher value means that less of the push was applied."""

    APPLIED = 1
    #: Applied before, with the same sequence: the answer had been lost.
    DUPLICATE = 2
    #: Non-finite and skipped by policy.
    SKIPPED = 3
    #: async, ssp: above the staleness threshold, not applied.
    STALE = 4
    #: sync: its step was applied without it.
    LATE = 5
    #: Refused with an error.
    REFUSED = 6
    #: A combined push that is not taken as one: each of its workers has to push by itself. No parameters come with it.
    SEPARATE = 7


@dataclass(frozen=True, slots=True)
class SideChannel:
    """A side channel that a shard offers for one stream."""

    #: None: one that this version does not know.
    transport: Transport | None
    #: Admits one connection.
    token: bytes
    #: shm: path of a Unix socket.
    name: str = ""
    #: bulk: TCP port.
    port: int = 0
    #: bulk: the connection begins with a TLS handshake.
    tls: bool = False


@dataclass(frozen=True, slots=True)
class OpenedStream:
    """The answer to the opening of a stream."""

    version: int
    #: Of the worker on this shard.
    phase: int
    clock: int
    #: Of the last push accepted; 0: none.
    last_sequence: int
    initialised: bool
    torch_version: str
    side_channels: Sequence[SideChannel] = ()


@dataclass(frozen=True, slots=True)
class AttachedChannel:
    """The answer to AttachRequest. shm: descriptors of memory come with it."""

    #: Bytes of each gradient segment; 0: there is none.
    segment_bytes: int = 0
    #: Bytes of the memory for rows, each way; 0: there is none.
    room_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RefusedChannel:
    """A side channel that cannot be had."""

    error: PsError


@dataclass(frozen=True, slots=True)
class WaitingAnswer:
    """The answer to a pull takes long."""

    reason: str


@dataclass(slots=True)
class StepAnswer:
    """The answer to a push, a fetch or a pull. The transport of the shard fills in how the payload comes."""

    #: Of the push; 0: the answer to a fetch or a pull.
    sequence: int = 0
    outcome: Outcome = Outcome.APPLIED
    version: int = 0
    staleness: int = 0
    clock: int = 0
    #: Slices whose bytes are not in the payload.
    absent: tuple[int, ...] = ()
    with_buffers: bool = False
    #: The payload is in the stream's wire format.
    encoded: bool = False
    error: PsError | None = None
    differences: Sequence[OptionDifference] = ()
    #: Of a traced push: what its parameters waited for; empty: for nothing.
    waited_for: str = ""
    #: How long the parameters waited for other workers, by the consistency mode.
    waited_seconds: float = 0.0
    payload_bytes: int = 0
    #: The payload, where it is in the message.
    payload: bytes | memoryview = b""
    #: shm: number of the region that holds the payload; 0: the payload follows.
    segment: int = 0
    #: shm: that region is this stream's alone, and is not to be released.
    copied: bool = False


@dataclass(slots=True)
class RowsAnswer:
    """The answer to a lookup. The transport of the shard fills in how the payload comes."""

    number: int = 0
    version: int = 0
    error: PsError | None = None
    payload_bytes: int = 0
    #: The payload, where it is in the message.
    payload: bytes | memoryview = b""
    #: shm: the payload is in the memory for rows.
    in_room: bool = False


#: The answers that have a payload.
Answer = StepAnswer | RowsAnswer

StepReply = OpenedStream | AttachedChannel | RefusedChannel | WaitingAnswer | Answer
