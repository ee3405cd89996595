"""What a shard says of one model: how far it and its workers are, and what it has of tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
