"""Reads rows from one shard by calls of their own, outside any stream: for evaluators."""

from __future__ import annotations

from ps_worker.calls import ShardCalls
from ps_worker.tables.lookup import Part

_CALL_IDS = 300_000


def read_rows(calls: ShardCalls, part: Part) -> None:
    """Fill ``part`` with the newest rows, in calls of a size that messages have. Raises PsError."""
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
