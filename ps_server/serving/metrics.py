"""The metrics of a server: their option, the HTTP server that shows them, and the metrics of limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import click

from ps_protocol.logs import EventLogger
from ps_protocol.metrics.definition import Catalogue, Read, Sample
from ps_protocol.metrics.server import MetricsServer, Targets
from ps_protocol.security.security import OFF, Security
from ps_server.limits import LimitCounts
from ps_server.settings import PortOption

logger = EventLogger(__name__)

SERVER = Catalogue("server")

REFUSALS = SERVER.counter(
    "limit_refusals_total",
    "What a limit of the server has refused or closed, by the limit's name in docs/deploy.md: calls, peer_calls, "
    "metadata, first_message, feeds, peer_feeds, answers, uploads, side_handshakes, token_time; of the job: models, "
    "variables, slices, tables, buckets, model_bytes, names.",
    "limit",
)
USED = SERVER.gauge("limit_used", "How much of a limit is taken now; bytes for answers and uploads.", "limit")
MOST = SERVER.gauge("limit_most", "How much of a limit there is, as limit_used counts it.", "limit")


@dataclass(frozen=True)
class MetricsConfig:
    """Where a process serves its metrics; ``port`` 0: any free one, None: nowhere."""

    bind: str = "127.0.0.1"
    port: int | None = None
    #: Host that others reach this process at; empty: as bound.
    advertise: str = ""


def metrics_option(*envvars: str, what: str = "this process") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add --metrics-port; the command gets ``metrics_port``, for ``parse_metrics_port``. ``what`` serves them."""
    return click.option(
        "--metrics-port",
        cls=PortOption,
        default="0",
        show_default=True,
        metavar="PORT|off",
        envvar=list(envvars),
        help=f"Port on which Prometheus reads the metrics of {what}, at /metrics. 0: any free port, which is logged. "
        "off: none.",
    )


def serve_metrics(
    config: MetricsConfig,
    component: str,
    read: Read,
    constant: Mapping[str, str],
    targets: Targets | None = None,
    security: Security = OFF,
) -> MetricsServer | None:
    """Serve the metrics that ``read`` returns, with ``constant`` labels, of a ``component``; None for no port.

    Raises ConfigError when it cannot listen on the address, or may not without TLS and tokens.
    """
    if config.port is None:
        return None
    security.check_bind(config.bind, "the server of metrics")
    server = MetricsServer(
        config.bind,
        config.port,
        read,
        constant,
        targets,
        security=security,
        component=component,
        advertise=config.advertise,
    )
    logger.info("server.started", "metrics at %s", server.url)
    return server


def read_limits(counts: LimitCounts) -> Iterator[Sample]:
    """The metrics of the limits of this server."""
    for limit, count in counts.counts.items():
        yield REFUSALS.of(count, limit)
    for limit, (most, used) in counts.usage.items():
        yield USED.of(used, limit)
        yield MOST.of(most, limit)
