"""The program, arguments and environment of each process of a job."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ps_protocol.client.coordinator import LINEAGE_VARIABLE
from ps_protocol.cluster.address import METRICS_OFF
from ps_protocol.cluster.job import DEFAULT_JOB
from ps_protocol.cluster.replicas import STRATEGY_VARIABLE
from ps_protocol.cluster.scaling import WorkerRange
from ps_protocol.launch.commands import COORDINATOR, SHARD, coordinator_command, shard_command
from ps_protocol.logs import LogFormat
from ps_protocol.model.registered_optimizers import ENVIRONMENT as OPTIMIZERS_VARIABLE
from ps_protocol.model.spec import Consistency
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.settings import VARIABLES
from ps_protocol.tracing.settings import VARIABLE as TRACE_VARIABLE
from ps_server.cli.launcher.events import ProcessName, ProcessRole
from ps_server.cli.options.checkpoint import CheckpointConfig
from ps_server.cli.options.common import FORMAT_VARIABLE
from ps_server.cli.options.storage import Durability, StorageConfig

if TYPE_CHECKING:
    from ps_server.certs import CertificateFolder


LOOPBACK = "127.0.0.1"

TENSORBOARD_VARIABLE = "PS_TENSORBOARD"

PER_HOST_VARIABLE = "PS_PER_HOST"

CERTIFICATES = "tls"
"""Name of the folder of a job's certificates and tokens."""

ASKS_LAUNCHER = "launcher"
"""The engine of a coordinator that this program asks for what is missing (``WorkerRequests``)."""

ASKS_FOR_WORKERS = "launcher:workers"
"""The same where shards cannot be started and ended while the job runs."""

ASKS_FOR_LOST = "launcher:lost"
"""The same where workers cannot either: those that are lost are started again."""


@dataclass(frozen=True, slots=True)
class Script:
    """The training script: the command up to and including it, and its own arguments."""

    command: tuple[str, ...]
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Programs:
    """The four programs of a job and their configuration."""

    script: Script
    consistency: Consistency
    shards: int
    workers: int
    cores: int
    shard_threads: int | None = None
    seed: int | None = None
    log_level: str = "warning"
    log_format: LogFormat = LogFormat.TEXT
    storage: StorageConfig = field(default_factory=StorageConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    #: Further settings of ps-coordinator and of ps-server, by the names of their options.
    coordinator_settings: Mapping[str, object] = field(default_factory=dict)
    shard_settings: Mapping[str, object] = field(default_factory=dict)
    #: Of the coordinator at its first start; 0: any.
    port: int = 0
    #: Port of the coordinator's page; 0: any, None: no page.
    page_port: int | None = None
    #: Name of the job.
    job: str = DEFAULT_JOB
    #: The job has certificates and tokens of its own.
    tls: bool = False
    #: Port of the coordinator's metrics, 0: any; every other process takes any free one. None: no process serves any.
    metrics_port: int | None = 0
    #: Random name of this start of ps-run; for a job with a folder, the lineage of the folder.
    lineage: str = field(default_factory=lambda: secrets.token_hex(8))
    #: Folders for traces of all processes, and for event files of TensorBoard.
    trace: Path | None = None
    tensorboard: Path | None = None
    #: Name of the strategy, for scripts that name none; empty: none.
    strategy: str = ""
    #: Modules that register optimizers, for shards and workers.
    optimizers: str = ""
    #: Addresses at which others reach processes on several hosts; all others are on this machine alone.
    addresses: Mapping[ProcessName, str] = field(default_factory=dict)
    #: Commands of ps-coordinator and ps-server.
    servers: tuple[tuple[str, ...], tuple[str, ...]] = (COORDINATOR, SHARD)
    #: Shards of this machine are forked from one process, if their command is ``SHARD``.
    forks_shards: bool = False
    #: How many workers the job may have; None: ``workers``, which it begins with, and no others.
    worker_range: WorkerRange | None = None
    #: Workers of one host push together; None: as their environment says.
    per_host: bool | None = None
    #: Several workers are on one of the several hosts of the job: in sync they push together, unless told otherwise.
    shares_hosts: bool = False

    def command(self, process: ProcessName, coordinator: str) -> list[str]:
        """The argument vector of ``process``. ``coordinator``: host:port, empty until it is known."""
        bind = self.addresses.get(process, LOOPBACK)
        common = {"log_level": self.log_level, "log_format": self.log_format}
        if process.part is ProcessRole.COORDINATOR:
            settings = {
                **common,
                "metrics_port": METRICS_OFF if self.metrics_port is None else self.metrics_port,
                "page_port": self.page_port,
                "shards": self.shards,
                "workers": self.worker_range or self.workers,
                "data_dir": self.storage.data_dir if self.keeps_state else None,
                "seed": self.seed,
                **self.coordinator_settings,
            }
            return coordinator_command(
                settings, bind=bind, port=self.port, served_at=coordinator, program=self.servers[0]
            )
        if process.part is ProcessRole.SHARD:
            settings = {
                **common,
                "metrics_port": self._any_metrics_port,
                # One that the job did not begin with is added to it; where it was before, it comes back.
                "add": process.index >= self.shards,
                "threads": self.shard_threads,
                **self.shard_settings,
            }
            return shard_command(process.index, coordinator, settings, bind=bind, program=self.servers[1])
        return [*self.script.command, *self.script.arguments]

    @property
    def _any_metrics_port(self) -> str:
        return METRICS_OFF if self.metrics_port is None else "0"

    @property
    def keeps_state(self) -> bool:
        """Whether servers keep their state over a restart."""
        return self.storage.durability is not Durability.MEMORY

    def summary(self, *, goes_on: bool) -> str:
        """A short description of the job. The mode of one that ``goes_on`` is in its journal."""
        workers = f"{self.workers} worker(s)"
        if self.worker_range is not None and self.worker_range.bounded and self.worker_range.most > self.workers:
            workers += f", {self.worker_range.most} at most"
        elif self.worker_range is not None and not self.worker_range.bounded:
            workers = "workers that come and go"
        parts = [f"{self.shards} shard(s)", workers, *([] if goes_on else [str(self.consistency)])]
        return ", ".join([*parts, *([f"{self.storage.durability.value} shards"] if self.keeps_state else [])])

    @property
    def _most_workers(self) -> int:
        """Among how many workers the cores are divided."""
        most = self.worker_range.most if self.worker_range is not None and self.worker_range.bounded else 0
        return max(1, most, self.workers)

    def environment(self, process: ProcessName, coordinator: str, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment of ``process``. Workers share the cores unless OMP_NUM_THREADS says otherwise."""
        environment = {**inherited, "PYTHONUNBUFFERED": "1"}
        # As in ps_worker, also for scripts that import gRPC before it.
        environment.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
        # A process is started only after the end of the previous one in its place.
        environment |= {VARIABLES["job"]: self.job} if self.job != DEFAULT_JOB else {}
        environment[LINEAGE_VARIABLE] = f"{self.lineage} {process}"
        if self.trace is not None:
            environment[TRACE_VARIABLE] = str(self.trace)
        if self.optimizers:
            environment[OPTIMIZERS_VARIABLE] = self.optimizers
        if process.part in (ProcessRole.WORKER, ProcessRole.EVALUATOR):
            if self.strategy:
                environment[STRATEGY_VARIABLE] = self.strategy
            environment.setdefault("OMP_NUM_THREADS", str(max(1, self.cores // self._most_workers)))
            environment |= {
                "PS_COORDINATOR": coordinator,
                "PS_ROLE": process.part.value,
                "PS_RANK": str(process.index),
                "PS_METRICS_PORT": self._any_metrics_port,
            }
            if self.per_host is not None and process.part is ProcessRole.WORKER:
                environment[PER_HOST_VARIABLE] = str(int(self.per_host))
            elif self.shares_hosts and process.part is ProcessRole.WORKER:
                environment.setdefault(PER_HOST_VARIABLE, "sync")
            if process in self.addresses:
                environment.setdefault("PS_METRICS_BIND", self.addresses[process])
            if self.log_format is LogFormat.JSON:
                environment[FORMAT_VARIABLE] = self.log_format.value
            if self.tensorboard is not None:
                environment[TENSORBOARD_VARIABLE] = str(self.tensorboard)
        return environment


def certificates_in(path: Path, shards: int, hosts: Sequence[str] = (), job: str = DEFAULT_JOB) -> CertificateFolder:
    """Make the certificates and tokens of a job in ``path``. Raises ConfigError.

    Certificates of an earlier start are renewed; tokens stay. ``hosts``: names and addresses of servers, beside those
    of this machine. ``job``: the name of the job.
    """
    from ps_server.certs import CertificateFolder  # slow to import

    folder = CertificateFolder(path, job)
    if folder.authority_file.exists():
        folder.renew(shards, hosts)
    else:
        folder.make(shards, hosts)
    return folder


def security_environment(process: ProcessName, folder: CertificateFolder | None) -> Mapping[str, str]:
    """The variables that name the certificate of ``process`` and the token that it needs."""
    if folder is None:
        return {}
    match process.part:
        case ProcessRole.COORDINATOR:
            settings = folder.settings("coordinator")
        case ProcessRole.SHARD:
            settings = folder.settings(f"shard-{process.index}")
        case ProcessRole.WORKER:
            settings = folder.settings("worker", role=AccessRole.WORKER)
        case _:
            settings = folder.settings("reader", role=AccessRole.READER)
    return settings.environment
