"""The metric of limits, which coordinator and shards have alike."""

from __future__ import annotations

from collections.abc import Iterator

from ps_protocol.metrics.definition import Catalogue, Sample
from ps_server.limits import LimitCounts

SERVER = Catalogue("server")

REFUSALS = SERVER.counter(
    "limit_refusals_total",
    "What a limit of the server has refused or closed, by the limit's name in docs/deploy.md: connections, "
    "peer_connections (of one host), handshakes and handshake_time (before the first call), calls, peer_calls, "
    "metadata, first_message, feeds, peer_feeds, answers, uploads, side_handshakes, token_time; of the job: models, "
    "variables, slices, tables, buckets, model_bytes, names.",
    "limit",
)
USED = SERVER.gauge("limit_used", "How much of a limit is taken now; bytes for answers and uploads.", "limit")
MOST = SERVER.gauge("limit_most", "How much of a limit there is, as limit_used counts it.", "limit")


def read_limits(counts: LimitCounts) -> Iterator[Sample]:
    """The numbers of this server."""
    for limit, count in counts.counts.items():
        yield REFUSALS.of(count, limit)
    for limit, (most, used) in counts.held.items():
        yield USED.of(used, limit)
        yield MOST.of(most, limit)
