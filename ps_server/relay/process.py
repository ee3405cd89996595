"""Runs a relay of published weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ps_protocol import times
from ps_protocol.metrics.call_on_loop import call_on_loop
from ps_protocol.metrics.server import JOB_LABEL
from ps_protocol.model.spec import DType
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_protocol.security.settings import SecuritySettings
from ps_protocol.weights.pieces import Received
from ps_server.coordinator.service import MAX_REQUEST_BYTES
from ps_server.limits import LimitCounts, ServerLimits
from ps_server.relay.following import JobFollower, Say
from ps_server.relay.held import RelayedVersion, RelayedWeights
from ps_server.relay.metrics import RELAY, RelayMetrics
from ps_server.relay.service import RelayService
from ps_server.serving import grpc_server
from ps_server.serving.authorization import Authorization
from ps_server.serving.metrics import MetricsConfig, serve_metrics
from ps_server.shard.config import SideChannelConfig
from ps_server.shard.transport.side_channels import SideChannels


@dataclass(frozen=True, kw_only=True)
class RelayConfig:
    """The configuration of one relay."""

    #: Of the job, or another relay.
    coordinator: str
    #: What it serves; none: everything that is published.
    names: tuple[str, ...] = ()
    #: Floating-point values are received, kept and served as this; None: as they were trained.
    dtype: DType | None = None
    #: How many versions of a name it keeps.
    keep: int = 2
    bind: str = "127.0.0.1"
    port: int = 0
    #: host:port at which readers reach this relay; empty: the address that it listens on.
    advertise: str = ""
    ready_file: Path | None = None
    side_channels: SideChannelConfig = field(default_factory=SideChannelConfig)
    security: SecuritySettings = field(default_factory=SecuritySettings)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    #: What is said of servers that do not answer comes at this interval at the latest.
    patience_seconds: float = times.PATIENCE_SECONDS


async def serve(
    config: RelayConfig,
    stop: asyncio.Event,
    on_version: Callable[[str, RelayedVersion, Received], None] = lambda name, version, received: None,
    say: Say = lambda event, text: None,
) -> None:
    """Relay until ``stop``, or until the job is finished and nobody reads here any more.

    ``on_version`` and ``say`` are called in other threads. Raises ConfigError when it cannot listen, and what the job
    answers where it refuses this relay from the beginning.
    """
    security = Security(config.security, AccessRole.READER, listens=True)
    counts = LimitCounts()
    side_channels = SideChannels(config.side_channels, security, counts)
    following = JobFollower(
        config.coordinator,
        security,
        config.names,
        dtype=config.dtype,
        bulk=bool(config.side_channels.ports),
        patience_seconds=config.patience_seconds,
        on_version=on_version,
        say=say,
    )
    held = RelayedWeights(config.names, config.keep, following.confirm, side_channels, config.dtype)
    server = metrics = None
    try:
        server = await grpc_server.start(
            config.bind,
            config.port,
            RelayService(held).services,
            MAX_REQUEST_BYTES,
            authorization=Authorization(security),
            limits=ServerLimits(),
            limit_counts=counts,
        )
        held.address = config.advertise or server.address
        say("relay", f"relay serves at {held.address}")
        following.begin(held)  # whose threads may have something to say at once
        read = call_on_loop(asyncio.get_running_loop(), RelayMetrics(held, following, counts).read)
        job = {JOB_LABEL: config.security.job}
        if metrics := serve_metrics(config.metrics, RELAY.role, read, job, security=security):
            say("relay", f"metrics at {metrics.url}")
        if config.ready_file is not None:
            grpc_server.write_ready_file(config.ready_file, server.address)
        stopping = asyncio.ensure_future(stop.wait())
        ends: list[asyncio.Future[Any]] = [stopping, following.failed]
        while not following.finished or held.is_read:
            done, _ = await asyncio.wait(ends, timeout=times.LIFE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if done:
                break
        stopping.cancel()
        if following.failed.done():
            following.failed.result()
    finally:
        held.end()
        if metrics:
            await asyncio.to_thread(metrics.close)
        await following.stop()
        if server:
            await server.stop()
        await held.close()
        await side_channels.close()
