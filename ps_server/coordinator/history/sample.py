"""The numbers of a job that become curves, from its status."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ps_protocol.cluster.view import ClusterStatus, MemberStatus, Role
from ps_server.coordinator.history.curve_book import Key, Spread
from ps_server.glance.workers import clock_now, has_stepped

STEPS, SAMPLES, BYTES = "steps/s", "samples/s", "bytes/s"
STALENESS, SPREAD, WORKERS = "staleness", "clock spread", "workers"


def sample(status: ClusterStatus) -> dict[Key, Spread]:
    """Sums of rates over live members, bounds over live workers, and what scripts report, by name of the curve."""
    live = [entry for entry in status.members if not entry.gone]
    workers = [entry for entry in live if entry.member.role is Role.WORKER]
    shards = [entry for entry in live if entry.member.role is Role.SHARD]
    found = {
        (STEPS, False): _total(entry.stats.steps_per_second for entry in workers),
        (SAMPLES, False): _total(entry.stats.samples_per_second for entry in workers),
        (BYTES, False): _total(entry.stats.bytes_per_second for entry in shards),
        (WORKERS, False): _one(len(workers)),
    }
    if workers:
        found[STALENESS, False] = spread_of(entry.stats.staleness for entry in workers)
        found[SPREAD, False] = _one(clock_spread(workers))
    for role, suffix in ((Role.WORKER, ""), (Role.EVALUATOR, " (evaluator)")):
        reports: dict[str, list[float]] = {}
        for entry in live:
            if entry.member.role is role:
                for name, value in entry.stats.metrics.items():
                    reports.setdefault(name + suffix, []).append(value)
        found |= {(name, True): spread_of(values) for name, values in reports.items()}
    return found


def clock_spread(workers: Sequence[MemberStatus]) -> int:
    """By about how many steps the first worker is ahead of the last, of those in the highest phase.

    A worker that has not pushed since it joined, as in a job that goes on, has no clock yet.
    """
    stepped = [entry for entry in workers if has_stepped(entry)]
    phase = max((entry.stats.phase for entry in stepped), default=0)
    clocks = [clock_now(entry) for entry in stepped if entry.stats.phase == phase]
    return round(max(clocks) - min(clocks)) if clocks else 0


def spread_of(values: Iterable[float]) -> Spread:
    """Values that are not finite count as nothing."""
    spread = Spread()
    for value in values:
        if math.isfinite(value):
            spread.take(value, value, value)
    return spread


def _one(value: float) -> Spread:
    return spread_of((value,))


def _total(values: Iterable[float]) -> Spread:
    return _one(sum(value for value in values if math.isfinite(value)))
