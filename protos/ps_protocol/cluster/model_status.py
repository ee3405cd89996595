"""What a shard reports of one model: the positions of its workers, its tables, and where it stands when paused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ps_protocol.cluster.transport import Transport


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The position of one worker."""

    rank: int
    incarnation: int
    phase: int
    clock: int
    last_sequence: int
    #: The transport of its open stream; None while it has none.
    transport: Transport | None
    #: It has been sent the model's values: those that training began with, or newer.
    has_values: bool = False


@dataclass(frozen=True, slots=True)
class TableStatus:
    """What a shard has of one table."""

    name: str
    rows: int
    #: Ids that have been used and have no row yet.
    waiting: int
    #: Bytes of rows, ids and maps.
    size_bytes: int
    updates: int
    #: Since the shard began: rows that came, that expired, that were evicted.
    inserted: int
    expired: int
    evicted: int
    #: As in the last step since the shard began that took rows; None before one.
    learning_rate: float | None


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """The status of one model on one shard."""

    #: Of the shard map that the shard serves by.
    epoch: int
    version: int
    initialised: bool
    clocks: tuple[WorkerStatus, ...]
    #: ``staleness_counts[i]``: pushes applied with staleness i; the last counts all beyond.
    staleness_counts: tuple[int, ...]
    #: Pushes by outcome name.
    outcomes: Mapping[str, int]
    #: Pulls that wait for the consistency mode.
    parked_pulls: int
    tables: tuple[TableStatus, ...]
    #: Loads that replaced values the model had, since this shard process began.
    assigned: int
    #: CRC-32 of the slices that were set last with checksums, by index.
    assigned_checksums: Mapping[int, int]
    #: Of each parameter group, as in the last step since this shard process began; empty before one.
    learning_rates: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ModelPosition:
    """The pushes of one model that a shard has accepted, or has to accept before it pauses."""

    model: str
    #: By rank and incarnation, the sequence of the last push accepted.
    accepted: Mapping[tuple[int, int], int]
    #: By rank and incarnation, the sequence of the first accepted push whose round is still open.
    open: Mapping[tuple[int, int], int] = field(default_factory=dict)
