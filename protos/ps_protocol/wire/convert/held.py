"""Between what a shard holds, in numbers, and the messages that say it."""

from __future__ import annotations

from ps_protocol.cluster.held import LogCounts, TableCounts
from ps_protocol.text import printable
from ps_protocol.v1 import coordinator_pb2 as pb

_MAX_NAME = 256


def table_counts_to_pb(counts: TableCounts) -> pb.TableCounts:
    """The wire form of the part of a table."""
    return pb.TableCounts(
        model=counts.model,
        table=counts.table,
        rows=counts.rows,
        waiting=counts.waiting,
        size_bytes=counts.size_bytes,
        inserted=counts.inserted,
        expired=counts.expired,
        evicted=counts.evicted,
    )


def table_counts_from_pb(message: pb.TableCounts) -> TableCounts:
    """The part of a table; very long names are cut."""
    return TableCounts(
        model=printable(message.model[:_MAX_NAME]),
        table=printable(message.table[:_MAX_NAME]),
        rows=message.rows,
        waiting=message.waiting,
        size_bytes=message.size_bytes,
        inserted=message.inserted,
        expired=message.expired,
        evicted=message.evicted,
    )


def log_counts_to_pb(counts: LogCounts) -> pb.LogCounts:
    """The wire form of what is known of a log."""
    return pb.LogCounts(
        records=counts.records,
        written_bytes=counts.written_bytes,
        unsaved_bytes=counts.unsaved_bytes,
        snapshot_age_seconds=counts.snapshot_age_seconds,
    )


def log_counts_from_pb(message: pb.LogCounts) -> LogCounts:
    """What is known of a log."""
    return LogCounts(
        records=message.records,
        written_bytes=message.written_bytes,
        unsaved_bytes=message.unsaved_bytes,
        snapshot_age_seconds=message.snapshot_age_seconds if message.HasField("snapshot_age_seconds") else None,
    )
