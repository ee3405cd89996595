"""The configuration of one shard process, from its options. Imports no torch, so that options are read without it."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from ps_protocol import times
from ps_protocol.cluster.address import parse_metrics_port, split_address
from ps_protocol.errors import ConfigError
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_protocol.security.settings import SecuritySettings
from ps_server.checkpoint.files import check_writable
from ps_server.cli.options.common import OWN_DESCRIPTORS, check_descriptors, check_ready_file
from ps_server.cli.options.storage import Durability, StorageConfig, StorageOptions
from ps_server.failpoints import ENVIRONMENT, Failpoints
from ps_server.limits import ShardLimits
from ps_server.serving.grpc_server import check_free
from ps_server.serving.metrics import MetricsConfig
from ps_server.settings import Finite, configured, setting
from ps_server.shard.execution.watchdog import EXIT_STUCK
from ps_server.shard.times import STUCK_SECONDS


class Acknowledge(enum.Enum):
    """When a shard acknowledges a push."""

    #: When this shard has logged it. If the shard is lost and the standby lags, the push is lost.
    BEFORE = "before"
    #: When its standby has it, too, while there is one.
    AFTER = "after"


@dataclass(frozen=True)
class SideChannelConfig:
    """Which side channels a shard offers. Ports are tried in order; 0 is any free one; none: no bulk transport."""

    bind: str = "127.0.0.1"
    ports: Sequence[int] = (0,)
    shm: bool = setting(True, "Use shared memory with workers on the same host.")
    stall_seconds: float = times.PATIENCE_SECONDS
    #: How long a token admits a connection, and how long a connection may take to show one.
    token_seconds: float = 10.0
    #: Connections that have not shown a token; one more closes the oldest.
    max_handshakes: int = 64


@dataclass(frozen=True, kw_only=True)
class ShardConfig:
    """The configuration of one shard process."""

    shard: int
    coordinator: str
    bind: str = "127.0.0.1"
    port: int = 0
    ready_file: Path | None = None
    #: Empty: the address that it listens on.
    advertise: str = setting("", "host:port at which workers reach this shard, if they need another one.")
    side_channels: SideChannelConfig = field(default_factory=SideChannelConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    security: SecuritySettings = field(default_factory=SecuritySettings)
    #: Armed by tests only.
    failpoints: Failpoints = field(default_factory=Failpoints)
    standby: bool = setting(
        False,
        "Run as a standby while another process serves this shard: follow its log, and take over when it is lost. "
        "Both processes can have this option; each needs its own --data-dir.",
    )
    acknowledge: Acknowledge = setting(
        Acknowledge.BEFORE,
        "Whether a push is acknowledged before or after the standby has it. With before, a push that the standby "
        "lacks is lost when this process is lost.",
    )
    add: bool = setting(
        False,
        "Add this shard to the running job if its number is new. It has no slices until psctl move --to moves some "
        "to it. A restart does not need this option.",
    )
    take_over: bool = setting(
        False,
        "Replace the process that serves this shard, even if it is alive; it is fenced. Without this option, a "
        "process whose place is taken waits for one lease, and is refused if the other process is alive.",
    )
    #: 0: the memory of the machine.
    max_model_bytes: int = setting(
        0,
        "Limit of the bytes of values in all models of this shard.",
        click.IntRange(0),
        show_default="the memory of the machine",
    )
    #: Checkpoints are written and read below these alone.
    checkpoint_dirs: tuple[Path, ...] = ()
    #: torch's threads; 0: half of the cores.
    threads: int = setting(0, "Number of threads of the optimizer; 0: half of the cores.", click.IntRange(0))
    stuck_seconds: float = setting(
        STUCK_SECONDS,
        f"The process exits with code {EXIT_STUCK} when one task takes longer than this, plus one second for each "
        "10 MB it touches, so that a restart or a standby replaces it. 0: never.",
        Finite(0),
    )
    #: End when the job needs no shard any more.
    exit_when_finished: bool = False
    limits: ShardLimits = field(default_factory=ShardLimits)
    connect_timeout_seconds: float = setting(
        60.0, "Seconds to wait for the coordinator at the start.", name="connect_timeout"
    )


def configure(options: Mapping[str, Any]) -> ShardConfig:
    """The configuration of the command's ``options``. Raises ConfigError where they cannot be used here.

    Errors are found here, before torch is imported, which takes long on a busy machine.
    """
    for name in ("shard", "coordinator"):
        if options[name] is None:
            raise ConfigError(f"--{name} is missing", remedy=f"give --{name}, or set TF_CONFIG; see ps-server --help")
    bind, advertise, limits = options["bind"], options["advertise"], configured(ShardLimits, options)
    split_address(options["coordinator"], setting="--coordinator, PS_COORDINATOR or TF_CONFIG")
    if advertise:
        split_address(advertise, "this shard", "--advertise")
    metrics = MetricsConfig(bind, parse_metrics_port(options["metrics_port"]), advertise.rpartition(":")[0].strip("[]"))
    side_channels = configured(
        SideChannelConfig,
        options,
        ports=parse_ports(options["bulk_ports"]),
        max_handshakes=limits.max_side_handshakes,
    )
    check_descriptors(OWN_DESCRIPTORS, f"shard {options['shard']}")
    check_ready_file(options["ready_file"])
    check_free(bind, options["port"])
    Security(options["security"], AccessRole.SERVER, listens=True).check_bind(bind, "this server")
    config = configured(
        ShardConfig,
        options,
        side_channels=side_channels,
        storage=configured(StorageOptions, options).config(),
        metrics=metrics,
        failpoints=Failpoints.parse(os.environ.get(ENVIRONMENT, "")),
        checkpoint_dirs=(*options["checkpoint_dirs"], *options["restore_dirs"]),
        limits=limits,
    )
    # The other folders may be read-only.
    for folder in options["checkpoint_dirs"][:1]:
        check_writable(folder)
    if config.standby or config.acknowledge is Acknowledge.AFTER:
        _check_followable(config.storage)
    return config


def _check_followable(storage: StorageConfig) -> None:
    """Raises ConfigError unless the shard has a log on disk."""
    if storage.durability is not Durability.DURABLE:
        raise ConfigError(
            "a standby follows a log on disk, and keeps one",
            expected="--data-dir, and --durability durable",
            actual=f"--durability {storage.durability.value}",
            remedy="give --data-dir, or leave out --standby and --acknowledge",
        )


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
            "--bulk-ports is not a port, a range of ports, or off", expected="7200, 7200-7299, 0 or off", actual=text
        )
    return ports
