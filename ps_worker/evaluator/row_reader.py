"""Reads rows from one shard for an evaluator, by calls outside of step streams."""

from __future__ import annotations

from ps_worker.step.shard_calls import ShardClient
from ps_worker.tables.lookup import ShardLookup

_CALL_IDS = 300_000


def read_rows(calls: ShardClient, part: ShardLookup) -> None:
    """Fill ``part`` with the newest rows, in calls that fit into a message. Raises PsError."""
    pieces = iter(zip(part.ids, part.pieces, strict=True))
    for table in part.tables:
        left = table.rows
        while left:
            ids, rows = next(pieces)
            count = len(ids) // 8
            row_bytes = len(rows) // count
            for begin in range(0, count, _CALL_IDS):
                end = min(count, begin + _CALL_IDS)
                calls.get_rows(table.table, [ids[8 * begin : 8 * end]], [rows[row_bytes * begin : row_bytes * end]])
            left -= count
    part.arrived = True
