"""What one shard process is told at its start. Imports no torch, so that options are read without it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ps_protocol.security.settings import SecuritySettings
from ps_protocol.wire.socket_messages import STALL_SECONDS
from ps_server.cli.options.storage import StorageConfig
from ps_server.failpoints import Failpoints
from ps_server.limits import ServerLimits
from ps_server.serving.metrics import MetricsConfig
from ps_server.shard.execution.watchdog import STUCK_SECONDS


class Acknowledge(enum.Enum):
    """When a worker is told that its push was taken."""

    #: When this shard has it in its log: a push that was acknowledged is lost with the shard if the standby lags.
    BEFORE = "before"
    #: When its standby has it, too, while it has one.
    AFTER = "after"


@dataclass(frozen=True)
class SideChannelConfig:
    """Which side channels a shard offers. Ports are tried in order; 0 is any free one; none: no bulk transport."""

    bind: str = "127.0.0.1"
    ports: Sequence[int] = (0,)
    shm: bool = True
    stall_seconds: float = STALL_SECONDS
    #: How long a token admits a connection, and how long a connection may take to show one.
    token_seconds: float = 10.0
    #: Connections that have not shown a token; one more closes the oldest.
    max_handshakes: int = 64


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
    #: A process that holds the place already is followed.
    standby: bool = False
    acknowledge: Acknowledge = Acknowledge.BEFORE
    #: A number that the job does not have yet is added to it.
    add: bool = False
    #: A piece of work that takes longer ends the process; 0: never.
    stuck_seconds: float = STUCK_SECONDS
    #: Values of variables of all models that it takes; 0: as many as this machine has memory.
    max_model_bytes: int = 0
    #: From a process that may live.
    take_over: bool = False
    #: Memory of answers on their way; 0: a quarter of this machine's.
    answer_bytes: int = 0
    #: Memory of what clients are sending; 0: a quarter of this machine's.
    upload_bytes: int = field(default=0, kw_only=True)
    #: Checkpoints are written and read below these alone.
    checkpoint_dirs: tuple[Path, ...] = ()
    #: End when the job needs no shard any more.
    exit_when_finished: bool = False
    limits: ServerLimits = field(default_factory=ServerLimits, kw_only=True)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    security: SecuritySettings = field(default_factory=SecuritySettings)
