"""Decides how often members send heartbeats: pure."""

from __future__ import annotations

from ps_protocol import times

BEATS_PER_SECOND = 300.0
"""Of all members together, where their leases allow it: about a fifth of a core."""


def next_heartbeat_seconds(members: int, heartbeat_seconds: float, lease_seconds: float) -> float:
    """Seconds between two heartbeats of one of ``members``: never less than ``heartbeat_seconds``, as is configured."""
    return max(heartbeat_seconds, min(members / BEATS_PER_SECOND, lease_seconds / times.BEATS_PER_LEASE))
