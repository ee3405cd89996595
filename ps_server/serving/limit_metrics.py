"""The metric of limits, which coordinator and shards have alike."""

from __future__ import annotations

from collections.abc import Iterator

from ps_protocol.metrics.definition import Catalogue, Sample
from ps_server.limits import LimitCounts

SERVER = Catalogue("server")

REFUSALS = SERVER.counter(
    "limit_refusals_total",
    "What a limit of the server has refused or closed: calls, peer_calls (of one host), feeds, peer_feeds, answers, "
    "handshakes (connections closed for newer ones), handshake_time.",
    "limit",
)


def read_limits(counts: LimitCounts) -> Iterator[Sample]:
    """The numbers of this server."""
    for limit, count in counts.counts.items():
        yield REFUSALS.of(count, limit)
