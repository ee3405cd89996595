"""Which program each process of a job runs, with which arguments and environment."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from ps_protocol.model import Consistency
from ps_server.launcher.events import Part, ProcessName
from ps_server.mode_options import flags_of

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
    #: Commands of ps-coordinator and ps-server.
    servers: tuple[tuple[str, ...], tuple[str, ...]] = SERVER_PROGRAMS

    def command(self, process: ProcessName, coordinator: str, ready_file: str) -> list[str]:
        """The argument vector of ``process``. ``coordinator`` is host:port, empty for the coordinator itself."""
        if process.part is Part.COORDINATOR:
            place = ["--bind", "127.0.0.1", "--port", "0", "--ready-file", ready_file]
            return [*self.servers[0], *place, "--log-level", self.log_level, *self._coordinator_arguments()]
        if process.part is Part.SHARD:
            threads = [] if self.shard_threads is None else ["--threads", str(self.shard_threads)]
            place = ["--shard", str(process.index), "--coordinator", coordinator, "--bind", "127.0.0.1", "--port", "0"]
            return [*self.servers[1], *place, "--log-level", self.log_level, *threads]
        return [*self.script.command, *self.script.arguments]

    def _coordinator_arguments(self) -> list[str]:
        arguments = ["--shards", str(self.shards), "--workers", str(self.workers), *flags_of(self.consistency)]
        return arguments if self.seed is None else [*arguments, "--seed", str(self.seed)]

    def summary(self) -> str:
        """The job in a few words."""
        return f"{self.shards} shard(s), {self.workers} worker(s), {self.consistency}"

    def environment(self, process: ProcessName, coordinator: str, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment of ``process``. Workers share the cores unless OMP_NUM_THREADS says otherwise."""
        environment = {**inherited, "PYTHONUNBUFFERED": "1"}
        # As ps_worker does itself, but also for scripts that load gRPC before it.
        environment.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
        if process.part in (Part.WORKER, Part.EVALUATOR):
            environment.setdefault("OMP_NUM_THREADS", str(max(1, self.cores // self.workers)))
            environment |= {
                "PS_COORDINATOR": coordinator,
                "PS_ROLE": process.part.value,
                "PS_RANK": str(process.index),
            }
        return environment
