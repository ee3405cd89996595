"""Decides when watchers are told of a new view: at once, or a little later where many views go to many watchers."""

from __future__ import annotations

import math
from dataclasses import replace

from ps_protocol.cluster.view import ClusterView, Member, Role
from ps_server.coordinator import times

UNBOUND_WATCHERS = 50
"""So many watchers are told of every view at once."""

SECONDS_PER_WATCHER = 2e-4
"""To tell one watcher takes about a third of this; so views take a part of the coordinator's time, never all of it."""


def is_urgent(told: ClusterView, now: ClusterView) -> bool:
    """Whether ``now`` has to reach watchers of ``told`` at once.

    Workers, evaluators and standbys that come and go may wait, and so may shards while the job has not started: nobody
    takes a step then. All else is urgent: the mode, models, moves, the start and the end of the job, and other shards
    in a job that has started.
    """
    if replace(told, revision=0, members=(), journal_mark=b"") != replace(
        now, revision=0, members=(), journal_mark=b""
    ):
        return True
    return now.started and _shards(told) != _shards(now)


def _shards(view: ClusterView) -> list[Member]:
    return [member for member in view.members if member.role is Role.SHARD]


class ViewPace:
    """When watchers were told last. Owned by the publisher; times are seconds of any steady clock."""

    def __init__(self) -> None:
        self._last = -math.inf

    def wait(self, now: float, watchers: int, *, urgent: bool) -> float:
        """Seconds from ``now`` until ``watchers`` are told of a new view; 0: at once."""
        if urgent or watchers <= UNBOUND_WATCHERS:
            return 0.0
        interval = min(times.VIEW_SECONDS, watchers * SECONDS_PER_WATCHER)
        return min(interval, max(0.0, self._last + interval - now))

    def told(self, now: float) -> None:
        """Watchers are told now."""
        self._last = now
