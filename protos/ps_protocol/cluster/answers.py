"""The answers of a shard on a step stream, without their payloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ps_protocol.errors import PsError
from ps_protocol.model.spec import OptionDifference


@dataclass(frozen=True, slots=True)
class OpenedStream:
    """The answer of a shard to the opening of a stream."""

    version: int
    phase: int
    clock: int
    last_sequence: int
    initialised: bool
    torch_version: str


@dataclass(slots=True)
class StepAnswer:
    """The answer to a push, a fetch or a pull, without its payload."""

    #: Of the push; 0: the answer to a fetch or a pull.
    sequence: int
    #: The name of the outcome, as "APPLIED"; a number that this version does not know as it came.
    outcome: str
    version: int
    staleness: int
    clock: int
    #: Slices whose bytes are not in the payload.
    absent: tuple[int, ...]
    with_buffers: bool
    payload_bytes: int
    encoded: bool
    #: shm: number of the region that holds the payload; 0: the payload follows.
    segment: int
    error: PsError | None = None
    differences: Sequence[OptionDifference] = ()
    #: Of a traced push: what its parameters waited for; empty: for nothing.
    waited_for: str = ""
    #: How long the parameters waited for other workers, by the consistency mode.
    waited_seconds: float = 0.0


@dataclass(slots=True)
class RowsAnswer:
    """The answer to a lookup, without its payload."""

    number: int
    payload_bytes: int
    #: shm: the payload is in the memory for rows.
    in_room: bool
    error: PsError | None = None


#: The answers that have a payload.
Answer = StepAnswer | RowsAnswer
