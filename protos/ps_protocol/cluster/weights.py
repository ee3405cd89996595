"""Published weights: what a publisher asks for, what is committed, and what a reader is told."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import index
from typing import SupportsIndex

from ps_protocol.errors import InvalidRequest

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
"""Of what is published; also the name of a folder."""

MOST_METADATA_BYTES = 16 << 10
"""Of a version."""


def check_name(name: object) -> None:
    """Raises InvalidRequest."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidRequest(
            "this is no name for what is published",
            expected="1 to 64 letters, digits, '.', '_' and '-', the first not '.' or '-'",
            actual=repr(name)[:100],
        )


def number_of(value: object) -> int | None:
    """``value`` as a whole number from 0 below 2^63, also one of numpy's; None: it is none."""
    number = None if isinstance(value, bool) or not isinstance(value, SupportsIndex) else index(value)
    return number if number is not None and 0 <= number < 1 << 63 else None


def check_metadata_size(metadata: str) -> None:
    """Raises InvalidRequest."""
    if (size := len(metadata.encode())) > MOST_METADATA_BYTES:
        raise InvalidRequest(
            "the metadata of a version is too large",
            expected=f"at most {MOST_METADATA_BYTES} bytes of JSON",
            actual=f"{size} bytes",
        )


@dataclass(frozen=True, slots=True)
class PublishAsk:
    """A version that is to be made."""

    #: Of what is published.
    name: str
    model: str
    #: What the publisher calls the training step.
    step: int
    #: A JSON object.
    metadata: str
    #: How many versions are kept.
    keep: int
    #: Random, one for each version.
    token: str


@dataclass(frozen=True, slots=True)
class WeightsPiece:
    """What one shard holds of a version."""

    shard: int
    #: Of the shard process that took it; it alone has a piece that is in no directory.
    incarnation: int
    #: Name of the data directory that has it; empty: it is in memory.
    directory: str
    #: xxh3-128 of its manifest.
    checksum: bytes
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WeightsVersion:
    """A version that was committed. Never changes."""

    number: int
    model: str
    step: int
    metadata: str
    #: Unix time.
    at_seconds: float
    pieces: tuple[WeightsPiece, ...]
    #: Of the job that made it: numbers of other jobs mean other versions.
    job_id: str = ""

    @property
    def size_bytes(self) -> int:
        """Of all pieces."""
        return sum(piece.size_bytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class WeightsPin:
    """A version that is kept although newer ones come."""

    number: int
    #: Who wants it.
    holder: str
    #: Unix time at which it ends.
    until_seconds: float


@dataclass(frozen=True, slots=True)
class ShardHome:
    """Who serves a shard's number now."""

    incarnation: int
    #: Name of its data directory; empty without one.
    directory: str
    address: str = ""


NOBODY = ShardHome(0, "")
"""A shard that is not there, and that the job does not wait for."""


@dataclass(frozen=True, slots=True)
class FollowAsk:
    """What a reader says and asks."""

    name: str
    #: The version it has; 0: none.
    have: int
    #: Exactly this version; 0: the newest.
    number: int
    #: Random, one for each reader.
    reader: str
    host: str = ""
    pid: int = 0
    #: Bytes it has received as deltas, and as whole pieces.
    delta_bytes: int = 0
    full_bytes: int = 0
    #: It ends.
    leaves: bool = False
    #: How many more bytes it would have received without deltas.
    saved_bytes: int = 0
    #: Of the job whose version it has; empty: it does not know.
    job_id: str = ""
    #: Of a relay: how many read what it has received.
    readers: int = 0


@dataclass(frozen=True, slots=True)
class FollowAnswer:
    """What a reader is told."""

    #: None: there is no version above the one it has.
    version: WeightsVersion | None
    #: Of the shards that hold it, as far as they are there.
    addresses: Mapping[int, str]
    #: The number of the newest version that was committed; 0: none was.
    newest: int
    #: The job is finished.
    finished: bool


@dataclass(frozen=True, slots=True)
class WeightsReader:
    """A reader as others see it."""

    reader: str
    host: str
    pid: int
    have: int
    delta_bytes: int
    full_bytes: int
    #: Since it was heard of last.
    silent_seconds: float
    #: How many more bytes it would have received without deltas.
    saved_bytes: int = 0
    #: Of a relay: how many read what it has received.
    readers: int = 0


@dataclass(frozen=True, slots=True)
class WeightsState:
    """One name with everything that is known of it."""

    name: str
    model: str
    keep: int
    newest: int
    versions: tuple[WeightsVersion, ...] = ()
    pins: tuple[WeightsPin, ...] = ()
    #: Those that are furthest behind, the last one first.
    readers: tuple[WeightsReader, ...] = field(default=())
    #: Of the versions, those of which a piece is lost.
    gone: tuple[int, ...] = ()
    #: All readers.
    reader_count: int = 0
    #: Of all readers: how far the last one is behind, and the sums of what they have received.
    most_behind: int = 0
    delta_bytes: int = 0
    full_bytes: int = 0
    saved_bytes: int = 0
    #: Readers that relays serve, which are none of those counted above.
    relayed_readers: int = 0

    def behind(self, reader: WeightsReader) -> int:
        """Versions that ``reader`` has not got."""
        return max(0, self.newest - reader.have)

    @property
    def readable(self) -> WeightsVersion | None:
        """The newest version of which no piece is lost."""
        return next((version for version in reversed(self.versions) if version.number not in self.gone), None)
