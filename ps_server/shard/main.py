"""``ps-server``: one shard as a process."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ps_protocol.client.coordinator import CoordinatorClient, JoinSpec
from ps_protocol.client.membership import Membership
from ps_protocol.errors import ConfigError, Fenced
from ps_protocol.model import ShardMap
from ps_protocol.tf_config import TfConfig
from ps_protocol.view import ClusterView, Role
from ps_server import serving
from ps_server.cli import clean_errors, configure_logging, server_options
from ps_server.failpoints import ENVIRONMENT, Failpoints
from ps_server.shard.counters import Counters
from ps_server.shard.lane import Lane
from ps_server.shard.malloc import use_one_arena
from ps_server.shard.registry import Registry, ShardParts
from ps_server.shard.service import SERVICE, ShardService
from ps_server.shard.side_channels import SideChannelConfig, SideChannels
from ps_server.shard.storage import Storage
from ps_server.storage_options import StorageConfig, storage_config, storage_options

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShardConfig:
    """What one shard process was told."""

    shard: int
    coordinator: str
    bind: str
    port: int
    #: host:port that workers dial; empty: where it listens.
    advertise: str
    #: torch's threads; 0: half of the cores.
    threads: int
    connect_timeout_seconds: float
    ready_file: Path | None
    side_channels: SideChannelConfig = field(default_factory=SideChannelConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    #: Armed by tests only.
    failpoints: Failpoints = field(default_factory=Failpoints)


async def serve(config: ShardConfig, stop: asyncio.Event) -> None:
    """Serve shard ``config.shard`` until ``stop``. Raises PsError when it cannot listen, join, or stay a member."""
    client = CoordinatorClient(config.coordinator)
    counters = Counters()
    lane = Lane(config.threads)

    async def fetch(model: str) -> ShardMap:
        return await asyncio.to_thread(client.get_shard_map, model)

    storage = await Storage.open(config.shard, config.storage, lane)
    registry = Registry(ShardParts(config.shard, lane, fetch, storage.log, config.failpoints), storage.recovered)
    side_channels = SideChannels(config.side_channels)
    service = ShardService(config.shard, registry, counters, side_channels)
    server = await serving.start(config.bind, config.port, [(SERVICE, service.register)])
    address = config.advertise or server.address
    try:
        membership = await _join(client, config, address, storage.incarnation, stop)
        if membership is None:
            return
        try:
            if storage.begin(membership.member.incarnation, lambda: registry.models):
                # Before the first push is acknowledged: from now on older copies of this state are refused.
                await asyncio.to_thread(membership.announce_state)
            logger.info("shard %d serves on %s", config.shard, address)
            if config.ready_file:
                serving.write_ready_file(config.ready_file, address)
            await _follow(membership, registry, counters, stop)
        finally:
            await asyncio.to_thread(membership.leave, "stopped")
    finally:
        await server.stop()
        await side_channels.close()
        await storage.close()
        client.close()
        lane.close()


async def _join(
    client: CoordinatorClient, config: ShardConfig, address: str, data_incarnation: int, stop: asyncio.Event
) -> Membership | None:
    """Become a member; None when told to stop while the coordinator is not there yet."""
    spec = JoinSpec(Role.SHARD, config.shard, address, data_incarnation=data_incarnation)
    joining = asyncio.ensure_future(
        asyncio.to_thread(Membership.join, client, spec, config.connect_timeout_seconds, logger.warning)
    )
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait([joining, stopping], return_when=asyncio.FIRST_COMPLETED)
    if joining.done():
        stopping.cancel()
        return joining.result()
    client.close()  # ends the attempt in the other thread
    await asyncio.gather(joining, return_exceptions=True)
    return None


async def _follow(membership: Membership, registry: Registry, counters: Counters, stop: asyncio.Event) -> None:
    """Follow the cluster's views until told to stop. Raises Fenced when another process took this shard's place."""
    loop = asyncio.get_running_loop()
    fenced: asyncio.Future[Fenced] = loop.create_future()

    def on_view(view: ClusterView) -> None:
        loop.call_soon_threadsafe(registry.on_view, view)

    def on_fenced(error: Fenced) -> None:
        loop.call_soon_threadsafe(fenced.set_result, error)

    membership.set_stats(counters.stats)
    await asyncio.to_thread(membership.subscribe, on_view, on_fenced)
    stopping = asyncio.ensure_future(stop.wait())
    either: list[asyncio.Future[Any]] = [stopping, fenced]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if fenced.done():
        raise fenced.result()


@click.command(context_settings={"auto_envvar_prefix": "PS_SERVER", "show_default": True})
@click.option("--shard", type=click.IntRange(0), help="Number of this shard, from 0. Needed, except under TF_CONFIG.")
@click.option(
    "--coordinator",
    envvar=["PS_SERVER_COORDINATOR", "PS_COORDINATOR"],
    help="Coordinator's host:port. Needed, except under a TF_CONFIG with a chief.",
)
@server_options(default_port=0)
@click.option("--advertise", default="", help="host:port that workers dial, when it is not where this shard listens.")
@click.option(
    "--bulk-ports",
    default="0",
    metavar="PORT|FIRST-LAST|off",
    help="TCP port for tensors beside gRPC: the first free one is taken; 0 is any; off: everything goes over gRPC.",
)
@click.option("--shm/--no-shm", default=True, help="Share memory with workers on the same host.")
@storage_options
@click.option("--threads", type=click.IntRange(0), default=0, help="Threads of the optimizer; 0: half of the cores.")
@click.option(
    "--connect-timeout",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    help="Seconds to wait for the coordinator.",
)
def main(
    shard: int | None,
    coordinator: str | None,
    bind: str,
    port: int,
    log_level: str,
    ready_file: Path | None,
    advertise: str,
    bulk_ports: str,
    shm: bool,
    threads: int,
    connect_timeout: float,
    **storage: Any,
) -> None:
    r"""Run one shard: it holds its slices of every model, and applies the gradients pushed to it.

    The shard joins the coordinator, receives its slices when a worker declares a model, and keeps them in memory; with
    --data-dir on disk, too: started again with the same directory it goes on where it was, however it ended. Stop it
    with Ctrl-C or SIGTERM.

    \b
    Example, a cluster of one shard by hand:
      ps-coordinator --shards 1 --workers 2
      ps-server --shard 0 --coordinator 127.0.0.1:7000 --data-dir data
    """
    with clean_errors():
        use_one_arena()
        configure_logging(log_level)
        if text := os.environ.get("TF_CONFIG"):
            shard, coordinator, bind, port = _from_tf_config(TfConfig.parse(text), shard, coordinator, bind, port)
        if shard is None or coordinator is None:
            missing = "--shard" if shard is None else "--coordinator"
            raise ConfigError(f"{missing} is missing", remedy=f"give {missing}, or set TF_CONFIG; see ps-server --help")
        side_channels = SideChannelConfig(bind, parse_ports(bulk_ports), shm)
        config = ShardConfig(
            shard,
            coordinator,
            bind,
            port,
            advertise,
            threads,
            connect_timeout,
            ready_file,
            side_channels,
            storage_config(**storage),
            Failpoints.parse(os.environ.get(ENVIRONMENT, "")),
        )
        serving.run(lambda stop: serve(config, stop))


def parse_ports(text: str) -> Sequence[int]:
    """Ports of ``--bulk-ports``, none for "off". Raises ConfigError."""
    if text == "off":
        return ()
    first, dash, last = text.partition("-")
    try:
        ports = range(int(first), int(last if dash else first) + 1)
    except ValueError:
        ports = range(0)
    if not ports or ports[-1] > 65535 or ports[0] < 0:
        raise ConfigError(
            "--bulk-ports is no port, no range of ports, and not off", expected="7200, 7200-7299, 0 or off", actual=text
        )
    return ports


def _from_tf_config(
    tf_config: TfConfig, shard: int | None, coordinator: str | None, bind: str, port: int
) -> tuple[int, str | None, str, int]:
    """What flags leave open, from TF_CONFIG: the number, the coordinator, and where to listen."""
    if shard is None and tf_config.task_type != "ps":
        raise ConfigError(
            f"ps-server runs the tasks of type ps; this TF_CONFIG says {tf_config.task_type} {tf_config.task_index}",
            remedy="run ps-coordinator on the chief, the training script on workers, or give --shard",
        )
    number = tf_config.task_index if shard is None else shard
    host, _, listed = tf_config.shard_address(number).rpartition(":")
    default = click.get_current_context().get_parameter_source
    if default("bind") is ParameterSource.DEFAULT:
        bind = host.strip("[]")
    if default("port") is ParameterSource.DEFAULT:
        port = int(listed)
    return number, coordinator or tf_config.coordinator_address, bind, port


if __name__ == "__main__":
    main()
