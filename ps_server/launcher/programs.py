"""Which program each process of a job runs, with which arguments and environment."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ps_protocol.client.coordinator import LINEAGE_VARIABLE
from ps_protocol.model import Consistency
from ps_server.checkpoint_options import CheckpointConfig
from ps_server.checkpoint_options import flags_of as checkpoint_flags
from ps_server.launcher.events import Part, ProcessName
from ps_server.mode_options import flags_of
from ps_server.storage_options import Durability, StorageConfig

# -P: the folder ps-run was called in holds the user's modules, not the servers'.
SERVER_PROGRAMS = (
    (sys.executable, "-P", "-m", "ps_server.coordinator.main"),
    (sys.executable, "-P", "-m", "ps_server.shard.main"),
)


@dataclass(frozen=True, slots=True)
class Script:
    """The training script: the command up to and including it, and the arguments that are its own."""

    command: tuple[str, ...]
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Programs:
    """The four programs of a job and what they are told."""

    script: Script
    consistency: Consistency
    shards: int
    workers: int
    cores: int
    shard_threads: int | None = None
    seed: int | None = None
    log_level: str = "warning"
    storage: StorageConfig = field(default_factory=StorageConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    restore: str | None = None
    #: What else ps-coordinator is told, and the port it first listens on; 0: any.
    coordinator_flags: tuple[str, ...] = ()
    port: int = 0
    #: Random name of this start of ps-run; the same for a folder that one job has at a time.
    lineage: str = field(default_factory=lambda: secrets.token_hex(8))
    #: Commands of ps-coordinator and ps-server.
    servers: tuple[tuple[str, ...], tuple[str, ...]] = SERVER_PROGRAMS

    def command(self, process: ProcessName, coordinator: str, ready_file: str) -> list[str]:
        """The argument vector of ``process``. ``coordinator`` is host:port, empty until it is known: a coordinator that
        is started again comes back where its members look for it.
        """
        if process.part is Part.COORDINATOR:
            port = coordinator.rpartition(":")[2] or str(self.port)
            place = ["--bind", "127.0.0.1", "--port", port, "--ready-file", ready_file]
            return [*self.servers[0], *place, "--log-level", self.log_level, *self._coordinator_arguments()]
        if process.part is Part.SHARD:
            threads = [] if self.shard_threads is None else ["--threads", str(self.shard_threads)]
            place = ["--shard", str(process.index), "--coordinator", coordinator, "--bind", "127.0.0.1", "--port", "0"]
            return [
                *self.servers[1],
                *place,
                "--log-level",
                self.log_level,
                *threads,
                *self._shard_storage(),
                *self._shard_checkpoints(),
            ]
        return [*self.script.command, *self.script.arguments]

    def _coordinator_arguments(self) -> list[str]:
        arguments = ["--shards", str(self.shards), "--workers", str(self.workers), *flags_of(self.consistency)]
        if self.keeps_state:
            arguments += ["--data-dir", str(self.storage.data_dir)]
        arguments += [*checkpoint_flags(self.checkpoints, self.restore), *self.coordinator_flags]
        return arguments if self.seed is None else [*arguments, "--seed", str(self.seed)]

    def _shard_checkpoints(self) -> list[str]:
        """Where shards may write checkpoints and read them from."""
        folders = [] if self.checkpoints.directory is None else [self.checkpoints.directory]
        if self.restore is not None and self.restore != "latest":
            folders.append(Path(self.restore).absolute().parent)
        return [part for folder in folders for part in ("--checkpoint-dir", str(folder))]

    def _shard_storage(self) -> list[str]:
        if not self.keeps_state:
            return []
        rule = self.storage.snapshots
        return [
            *("--data-dir", str(self.storage.data_dir), "--durability", self.storage.durability.value),
            *("--snapshot-seconds", str(rule.seconds)),
            *(["--log-mb", str(rule.log_bytes >> 20)] if rule.strict else []),
            *(["--fsync"] if self.storage.fsync else []),
        ]

    @property
    def keeps_state(self) -> bool:
        """Whether servers can be started again where they were."""
        return self.storage.durability is not Durability.MEMORY

    def summary(self, *, goes_on: bool) -> str:
        """The job in a few words. The mode of one that ``goes_on`` is its journal's, whatever was asked for."""
        parts = [f"{self.shards} shard(s)", f"{self.workers} worker(s)", *([] if goes_on else [str(self.consistency)])]
        return ", ".join([*parts, *([f"{self.storage.durability.value} shards"] if self.keeps_state else [])])

    def environment(self, process: ProcessName, coordinator: str, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment of ``process``. Workers share the cores unless OMP_NUM_THREADS says otherwise."""
        environment = {**inherited, "PYTHONUNBUFFERED": "1"}
        # As ps_worker does itself, but also for scripts that load gRPC before it.
        environment.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
        # A process is started when the one before it in its place has ended.
        environment[LINEAGE_VARIABLE] = f"{self.lineage} {process}"
        if process.part in (Part.WORKER, Part.EVALUATOR):
            environment.setdefault("OMP_NUM_THREADS", str(max(1, self.cores // self.workers)))
            environment |= {
                "PS_COORDINATOR": coordinator,
                "PS_ROLE": process.part.value,
                "PS_RANK": str(process.index),
            }
        return environment
