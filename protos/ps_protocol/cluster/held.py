"""What a shard holds, in numbers for its heartbeats: tables, and its log and snapshots."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TableCounts:
    """The part of one table that a shard holds."""

    model: str
    table: str
    rows: int
    #: Ids that have been used and have no row yet.
    waiting: int
    #: Bytes of rows, ids and maps.
    size_bytes: int
    #: Since the shard began: rows that came, that expired, that were evicted.
    inserted: int
    expired: int
    evicted: int


@dataclass(frozen=True, slots=True)
class LogCounts:
    """The log and the snapshots in a shard's data directory."""

    #: The number of the last record.
    records: int
    #: Written since the process began.
    written_bytes: int
    #: Written since the last snapshot: what a restart replays.
    unsaved_bytes: int
    #: Since the last snapshot was complete; None: this process has made none.
    snapshot_age_seconds: float | None = None
