"""The settings of what a shard keeps on disk, shared by ps-server and ps-run."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path

from ps_protocol.errors import ConfigError
from ps_server.settings import ByteSize, setting

LOG_BYTES = 2 << 30
"""Default; a shard with larger records takes more."""


class Durability(enum.Enum):
    """Which state of a shard outlives its process."""

    #: Nothing.
    MEMORY = "memory"
    #: The state of some seconds ago.
    SNAPSHOT = "snapshot"
    #: Every push that was acknowledged.
    DURABLE = "durable"


@dataclass(frozen=True, slots=True)
class SnapshotRule:
    """When the next snapshot is due: at the first of these since the last one."""

    seconds: float = 60.0
    #: Size of the log on disk: snapshots begin early enough for it, unless the log grows faster than they are made.
    log_bytes: int = LOG_BYTES
    #: A model whose records need more is refused.
    strict: bool = False
    log_records: int = 50_000


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """What a shard keeps on disk, and where."""

    durability: Durability = Durability.MEMORY
    #: Needed unless durability is "memory".
    data_dir: Path | None = None
    #: An acknowledged push also survives a power failure.
    fsync: bool = False
    snapshots: SnapshotRule = field(default_factory=SnapshotRule)
    #: Memory for rows of tables, above which they are on disk; 0: all are in memory.
    table_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """The options of what a shard keeps on disk."""

    data_dir: Path | None = setting(
        None, "Folder for logs and snapshots; each shard uses a subfolder. Without it, state is in memory only."
    )
    durability: Durability | None = setting(
        None,
        "What survives the process. memory: nothing. snapshot: the state of at most --snapshot-seconds ago. "
        "durable: every acknowledged push.  [default: durable with --data-dir, else memory]",
    )
    fsync: bool = setting(False, "durable: acknowledged pushes also survive a power failure.")
    snapshot_seconds: float = setting(
        60.0, "Interval of snapshots. With durable, it only bounds the time of a restart."
    )
    log_mb: int | None = setting(
        None,
        "durable: disk space for the log. A snapshot is also taken before it is full. A model whose updates need "
        f"more is refused.  [default: {LOG_BYTES >> 20}, or what the largest update needs]",
        metavar="MB",
    )
    table_memory: int | None = setting(
        None,
        "Memory for the tables of a shard, such as 4GB (2^30 bytes each). Rows that were not used lately are in a file "
        "in --data-dir, without one in the system's folder for temporary files.  [default: all rows are in memory]",
        ByteSize(),
    )

    def config(self) -> StorageConfig:
        """The configuration of a shard. Raises ConfigError for options that contradict each other."""
        chosen = self.durability or (Durability.DURABLE if self.data_dir else Durability.MEMORY)
        if chosen is not Durability.MEMORY and self.data_dir is None:
            raise ConfigError(
                f"--durability {chosen.value} needs a data directory",
                remedy="give --data-dir, or --durability memory",
            )
        if self.fsync and chosen is not Durability.DURABLE:
            raise ConfigError(
                "--fsync is for --durability durable", actual=f"--durability {chosen.value}", remedy="leave --fsync out"
            )
        log_bytes = LOG_BYTES if self.log_mb is None else self.log_mb << 20
        rule = SnapshotRule(self.snapshot_seconds, log_bytes, strict=self.log_mb is not None)
        return StorageConfig(chosen, self.data_dir, self.fsync, rule, self.table_memory or 0)
