"""What the leader and the followers of a host tell each other, one packet each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import pairwise
from typing import Any, get_type_hints

from ps_protocol.errors import InvalidRequest

#: (phase, clock) of a push.
Position = tuple[int, int]

Numbers = tuple[int, ...]

FOREVER: Position = (1 << 63, 0)
"""Behind every position: phases are 48-bit."""


@dataclass(frozen=True, slots=True, order=True)
class HostWorker:
    """One process of a worker."""

    rank: int
    incarnation: int

    def __str__(self) -> str:
        return f"worker {self.rank}"


@dataclass(frozen=True, slots=True)
class HostHello:
    """The first packet of a follower."""

    rank: int
    incarnation: int
    #: A revision of the membership that includes it.
    revision: int
    seed: int
    #: Its model, its wire format and whether it overlaps: those of the leader, or it pushes by itself.
    model: str
    style: str

    @property
    def key(self) -> HostWorker:
        """Who it is."""
        return HostWorker(self.rank, self.incarnation)


@dataclass(frozen=True, slots=True)
class HostWelcome:
    """The leader takes the follower."""

    rank: int
    incarnation: int
    #: Exchanges that the leader has begun.
    exchanges: int

    @property
    def key(self) -> HostWorker:
        """Who leads."""
        return HostWorker(self.rank, self.incarnation)


@dataclass(frozen=True, slots=True)
class LentSegment:
    """Memory, whose descriptor comes with the packet; both ends know it by its number from then on."""

    number: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Deposit:
    """The push of a follower; its gradients stay as they are until it is answered or the connection ends."""

    sequence: int
    phase: int
    clock: int
    #: Of the shard map that its gradients are laid out by.
    epoch: int
    weight: float
    skipped: bool
    with_buffers: bool
    #: Variables without a gradient: begin, end, begin, end, ….
    absent: Numbers
    #: By shard that has anything of the model: its version of the parameters, and the segment with the gradients.
    versions: Numbers
    segments: Numbers
    #: The optimizer's options that are not as declared, as text.
    options: str
    #: Of each table that took part, its number and how many rows; and the segment with all ids, then all gradients.
    tables: Numbers = ()
    rows: int = 0

    @property
    def position(self) -> Position:
        """Where the push moves its worker to."""
        return self.phase, self.clock


@dataclass(frozen=True, slots=True)
class Away:
    """A follower makes no push at a position before this one."""

    phase: int
    clock: int


@dataclass(frozen=True, slots=True)
class ShardAnswer:
    """What one shard answered to the push of a round."""

    outcome: int
    #: Before the push, of the leader's parameters; and now.
    before: int
    version: int
    #: Of the leader after the push, on this shard.
    clock: int
    staleness: int
    #: The segment with what came, in the layout of the shard's region; slices that did not come, as in ``Deposit``.
    segment: int
    absent: Numbers
    with_buffers: bool


@dataclass(frozen=True, slots=True)
class RoundAnswer:
    """The round of a deposit was pushed, and answered by every shard."""

    waited_seconds: float
    #: That the step was made with, as in ``Deposit``.
    options: str
    parts: tuple[ShardAnswer, ...]


@dataclass(frozen=True, slots=True)
class Separate:
    """The deposit is in no round: its worker pushes by itself."""

    why: str


@dataclass(frozen=True, slots=True)
class HostRefusal:
    """A packet that the leader does not take; the connection ends."""

    why: str
    expected: str
    actual: str


Message = HostHello | HostWelcome | LentSegment | Deposit | Away | RoundAnswer | Separate | HostRefusal

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (HostHello, HostWelcome, LentSegment, Deposit, Away, RoundAnswer, Separate, HostRefusal)
}

MAX_BYTES = 1 << 20
"""No packet is longer."""


def to_bytes(message: Message) -> bytes:
    """``message`` as a packet."""
    return json.dumps([type(message).__name__, *_values(message)], separators=(",", ":")).encode()


def _values(record: Any) -> list[Any]:
    values = (getattr(record, field.name) for field in fields(record))
    return [[_values(each) for each in value] if _is_parts(value) else value for value in values]


def _is_parts(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], ShardAnswer)


def from_bytes(packet: bytes | memoryview) -> Message:
    """The message in ``packet``. Raises InvalidRequest for anything that this version does not send."""
    try:
        kind, *values = json.loads(bytes(packet))
        message: Message = _record(_KINDS[kind], values)
        return message
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidRequest(
            "a worker of this host sent what is no message",
            actual=repr(bytes(packet[:80])),
            remedy="use the same torch-ps for all workers of the host",
        ) from error


def _record(kind: type[Any], values: Any) -> Any:
    hints = _hints(kind.__name__)
    if not isinstance(values, list) or len(values) != len(hints):
        raise ValueError(kind.__name__)
    return kind(*map(_checked, hints, values))


@cache
def _hints(name: str) -> Sequence[Any]:
    return tuple(get_type_hints(_KINDS.get(name, ShardAnswer)).values())


def _checked(hint: Any, value: Any) -> Any:
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(value)
        return float(value)
    if hint is int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 64:
            raise ValueError(value)
        return value
    if hint in (bool, str):
        if not isinstance(value, hint):
            raise ValueError(value)
        return value
    if not isinstance(value, list):
        raise ValueError(value)
    if hint == Numbers:
        return tuple(_checked(int, each) for each in value)
    return tuple(_record(ShardAnswer, each) for each in value)


def runs_of(numbers: Sequence[int]) -> Numbers:
    """Rising ``numbers`` as runs: begin, end, begin, end, …."""
    runs: list[int] = []
    for number in numbers:
        if runs and runs[-1] == number:
            runs[-1] = number + 1
        else:
            runs += [number, number + 1]
    return tuple(runs)


def numbers_of(runs: Sequence[int], count: int) -> Numbers:
    """The numbers, all below ``count``, of ``runs``. Raises InvalidRequest for runs that do not rise."""
    bounds = [0, *runs, count]
    if len(runs) % 2 or any(one > other for one, other in pairwise(bounds)):
        raise InvalidRequest("runs do not rise", expected=f"numbers below {count}", actual=repr(list(runs))[:80])
    return tuple(n for begin, end in zip(runs[::2], runs[1::2], strict=True) for n in range(begin, end))
