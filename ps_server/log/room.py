"""Decides whether records that may come in any order fit into the segments that are there."""

from __future__ import annotations

from collections.abc import Collection


def fits(records: Collection[int], left: int, spares: Collection[int]) -> bool:
    """Whether ``records`` of these sizes can be written in any order, without another segment.

    Each goes behind the one before: into the ``left`` bytes of the open segment, else to the beginning of any of
    ``spares`` that holds it; what it leaves behind in the segment before is lost.
    """
    total = sum(records)
    if total <= left:
        return True
    largest, least = max(records), min(records)
    # A record that did not fit would have found all segments that hold the largest one used. A segment is left when a
    # record does not fit behind the others: it holds more than its size without the largest. One that was begun holds a
    # record.
    used = max(0, left - largest + 1) + sum(max(spare - largest + 1, least) for spare in spares if spare >= largest)
    return used + least > total and any(spare >= largest for spare in spares)
