"""``RayCluster``: a job in a Ray cluster, from a driver script."""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

if importlib.util.find_spec("ray") is None:
    raise ImportError("ps_worker.ray needs Ray: pip install 'torch-ps[worker,server,ray]'", name="ray")

import ray

from ps_protocol.client.worker_requests import Wanted, WorkerRequests
from ps_protocol.cluster.scaling import WorkerRange
from ps_protocol.errors import ConfigError, PsError
from ps_protocol.logs import EventLogger
from ps_protocol.security.settings import SecuritySettings
from ps_worker.ray.placement import Reservation, node_addresses
from ps_worker.ray.plan import (
    HALF_A_CPU,
    LOOPBACK,
    ONE_CPU,
    RayPlan,
    ServerKind,
    ServerName,
    pushing_per_host,
    uses_loopback,
    worker_environment,
)
from ps_worker.ray.servers import RayServers, requests_of
from ps_worker.ray.workers import RayWorkers

log = EventLogger("ps_worker")


class RayCluster:
    """A job in a Ray cluster: coordinator and shards as actors, and workers as a function on actors.

    Used as ``with RayCluster(…) as cluster``, from one thread of the driver. Lost servers are started again from
    ``data_dir``, and lost workers within ``run`` with their rank: whether their process was killed, its machine ran out
    of memory, or somebody called ``ray.kill``.
    """

    def __init__(
        self,
        shards: int = 1,
        workers: int | str | tuple[int, int] = 1,
        *,
        mode: str = "async",
        placement: str = "SPREAD",
        data_dir: str | Path | None = None,
        standbys: bool = False,
        shard_resources: Mapping[str, float] = ONE_CPU,
        worker_resources: Mapping[str, float] = ONE_CPU,
        coordinator_resources: Mapping[str, float] = HALF_A_CPU,
        server_restarts: int = 10,
        worker_restarts: int = 3,
        coordinator_options: Sequence[str] = (),
        shard_options: Sequence[str] = (),
        security: SecuritySettings | None = None,
        start_timeout_seconds: float = 120.0,
        connect_timeout_seconds: float | None = None,
        reconnect_timeout_seconds: float | None = None,
        per_host: bool | None = None,
    ) -> None:
        """Check the settings. Nothing is started before the ``with`` block.

        Args:
            shards: Number of shards.
            workers: Number of workers. ``(2, 8)`` or ``"2:8"``: ``run`` begins with 2, and ``psctl scale --workers``
                has as many as 8. 0: servers only, and ``run`` with the workers that are asked for, until all have left
                after training.
            mode: "async", "ssp" or "sync".
            placement: Strategy of Ray's placement group for the servers.
            data_dir: Folder on every node, its own disk or a shared one, from which servers continue.
            standbys: Give each shard a standby, with a folder of its own below ``data_dir``.
            shard_resources: Resources of each shard, as of Ray's bundles.
            worker_resources: Resources of each worker.
            coordinator_resources: Resources of the coordinator.
            server_restarts: How often a server is started again.
            worker_restarts: How often a worker is started again.
            coordinator_options: Further options of ps-coordinator, such as ``("--staleness", "8")``.
            shard_options: Further options of ps-server.
            security: Files of TLS and tokens, on every node; needed where the nodes of the Ray cluster are several
                machines.
            start_timeout_seconds: How long to wait for Ray to reserve resources, and for the servers to serve.
            connect_timeout_seconds: How long workers wait for the job to be complete. None: ``PS_CONNECT_TIMEOUT`` in
                the environment of the actors, else 600.
            reconnect_timeout_seconds: How long workers wait for a server that went away. None: ``PS_RECONNECT_TIMEOUT``
                there, else 600.
            per_host: Let the workers of one machine push together: one of them sends the mean of their gradients, and
                receives the parameters for all. None: ``PS_PER_HOST`` in the environment of the actors, else in sync
                where the Ray cluster has several machines.

        Raises:
            ConfigError: A setting is wrong.
        """
        asked = WorkerRange.of(workers, "the workers argument of RayCluster()")
        self._plan = RayPlan(
            shards=shards,
            workers=asked.least,
            worker_range=None if asked.fixed else asked,
            mode=mode,
            placement=placement,
            data_dir=None if data_dir is None else Path(data_dir).absolute(),
            standbys=standbys,
            shard_resources=dict(shard_resources),
            worker_resources=dict(worker_resources),
            coordinator_resources=dict(coordinator_resources),
            server_restarts=server_restarts,
            worker_restarts=worker_restarts,
            coordinator_options=tuple(coordinator_options),
            shard_options=tuple(shard_options),
            security=security or SecuritySettings(),
            connect_timeout_seconds=connect_timeout_seconds,
            reconnect_timeout_seconds=reconnect_timeout_seconds,
            per_host=per_host,
        )
        self._timeout_seconds = start_timeout_seconds
        #: The workers of one rank come one after the other, also those of several runs.
        self._lineage = secrets.token_hex(8)
        self._reservation: Reservation | None = None
        self._servers: RayServers | None = None
        self._workers: RayWorkers | None = None

    def __enter__(self) -> Self:
        """Start the servers. Raises Unavailable for too few resources, or a server that does not start; ConfigError."""
        if not ray.is_initialized():
            raise ConfigError(
                "this script is not connected to a Ray cluster", remedy="call ray.init() before RayCluster()"
            )
        addresses = node_addresses()
        plan = self._plan = pushing_per_host(self._plan, addresses)
        host = LOOPBACK if uses_loopback(plan.security, addresses) else ""
        self._reservation = Reservation(plan.server_bundles(), plan.placement, "servers", self._timeout_seconds)
        try:
            self._servers = RayServers(plan, self._reservation, host)
            self._servers.start(self._timeout_seconds)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except PsError as unsaved:
            if error is None:
                raise
            # The error that ended the block is the one that is raised.
            log.error("checkpoint.failed", "no checkpoint: %s", unsaved)

    @property
    def address(self) -> str:
        """Address of the coordinator, host:port, for psctl and ``connect``. Raises ConfigError before the start."""
        return self._started.address

    def run(self, train_fn: Callable[..., Any], config: Any = None) -> list[Any]:
        """Call a function on every worker, and return the results by rank.

        ``connect()`` in the function joins this job. A worker that is lost is started again: its function runs from the
        start, with the current parameters of the shards. So is one whose function ends with Unavailable, NotReady,
        StorageFull or Fenced, as long as a restart is left. Any other exception of the function ends the other workers,
        and is raised here.

        Args:
            train_fn: The function, which Ray has to be able to pickle.
            config: Its argument. None: it has none.

        Raises:
            Unavailable: Ray has too few resources, or a process was lost and no restart is left.
            StateLost: A server was lost, and there is no ``data_dir``.
        """
        servers = self._started
        plan = self._plan
        self.check()
        bundles = plan.worker_bundles()
        reservation = Reservation(bundles, "PACK", "workers", self._timeout_seconds) if bundles else None
        arguments = () if config is None else (config,)

        def environment_of(rank: int) -> dict[str, str]:
            return worker_environment(plan, servers.address, rank, self._lineage)

        self._workers = RayWorkers(plan, reservation, environment_of, train_fn, arguments)
        requests = requests_of(plan, servers.address) if plan.worker_restarts or plan.worker_range else None
        try:
            if requests is None and plan.worker_range is not None:
                raise ConfigError(
                    "the driver cannot ask the coordinator, which tells which workers are to run and when all are done",
                    remedy="give the driver the files of security, or RayCluster() a fixed number of workers",
                )
            return self._workers.run(self.check, partial(_wanted, requests))
        finally:
            if requests is not None:
                requests.close()
            self._workers.close()
            if reservation is not None and ray.is_initialized():
                reservation.release()

    def check(self) -> None:
        """Raise StateLost or Unavailable when a server was lost and cannot be started again."""
        if (failure := self._started.failure) is not None:
            raise failure

    def worker_environment(self, rank: int) -> dict[str, str]:
        """Return the variables of worker ``rank``, where something else than ``run`` starts it, such as Ray Train."""
        return worker_environment(self._plan, self.address, rank, "")

    def actor(self, role: str, index: int = 0) -> Any:
        """Return Ray's handle of an actor.

        Args:
            role: "coordinator", "shard", "standby" or "worker".
            index: Number of the shard, or rank of the worker.

        Raises:
            ConfigError: There is no such actor, also while it is started again.
        """
        try:
            if role == "worker":
                if self._workers is None:
                    raise KeyError(index)
                return self._workers.actor(index)
            return self._started.actor(ServerName(ServerKind(role), index))
        except (KeyError, ValueError):
            raise ConfigError(
                "no actor of this job has that place now",
                expected=f"coordinator, {self._plan.shards} shard(s), {self._plan.workers} worker(s) in run()",
                actual=f"{role} {index}",
                remedy="correct the role and number, or ask again in a moment",
            ) from None

    def close(self) -> None:
        """End all processes, servers with a last snapshot, and return the resources. Safe to repeat.

        Raises:
            Unavailable: ``coordinator_options`` have a --checkpoint-dir, and the last checkpoint of the job was not
                written.
        """
        servers, reservation = self._servers, self._reservation
        self._servers = self._reservation = None
        try:
            if servers is not None:
                servers.close()
        finally:
            if reservation is not None and ray.is_initialized():
                reservation.release()

    @property
    def _started(self) -> RayServers:
        if self._servers is None:
            raise ConfigError(
                "this RayCluster is not running", remedy="use it in a block: with RayCluster(…) as cluster"
            )
        return self._servers


def _wanted(requests: WorkerRequests | None, soon: bool) -> Wanted:
    """What the coordinator has requested since the last call; ``soon``: it is asked now."""
    if requests is None:
        return Wanted()
    if soon:
        requests.ask_now()
    return requests.take()
