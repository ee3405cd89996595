"""A real coordinator and real shards in this process, for sessions that join them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import ClusterView, MemberStatus, Role
from ps_protocol.security.expiry import ExpiryWatch
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import OFF
from ps_server.certs import CertificateFolder
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.cli.options.checkpoint import CheckpointConfig
from ps_server.coordinator.access import CoordinatorAccess
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.elasticity.engines.kept_request import KeptRequest
from ps_server.coordinator.jobs.checkpoints import Checkpoints
from ps_server.coordinator.service import SERVICE_NAME, CoordinatorService
from ps_server.coordinator.settings import ClusterSettings
from ps_server.serving import grpc_server
from ps_server.shard.config import ShardConfig
from ps_server.shard.process import serve as serve_shard
from ps_worker import Cluster
from ps_worker.session.config import PerHost, WorkerConfig
from ps_worker.session.session import Session
from tests.support.certificates import security_of
from tests.support.loops import LoopThread
from tests.support.shards import wait_until

T = TypeVar("T")


@dataclass
class RunningShard:
    stop: asyncio.Event
    served: Future[None]
    ready_file: Path


@dataclass
class Job:
    """One running coordinator, the shards started on its loop, and the sessions a test opened."""

    loop: LoopThread
    address: str
    client: CoordinatorClient
    exits: ExitStack
    folder: Path
    checkpoints: Checkpoints
    #: Where shards may write checkpoints and read them from.
    checkpoint_dirs: tuple[Path, ...] = ()
    #: The certificates and tokens of a job with security.
    lab: CertificateFolder | None = None
    _shards: list[RunningShard] = field(default_factory=list)

    def run_checkpoints(self) -> None:
        """Make them at their interval and at the end, as a coordinator does."""

        async def begin() -> asyncio.Task[None]:
            return asyncio.create_task(self.checkpoints.run())

        running = self.loop.run(begin())
        self.exits.callback(self.loop.loop.call_soon_threadsafe, running.cancel)

    @property
    def view(self) -> ClusterView:
        return self.client.get_status().view

    def member(self, role: Role, index: int) -> MemberStatus:
        """The newest life of a member, live or gone."""
        found = [m for m in self.client.get_status().members if (m.member.role, m.member.index) == (role, index)]
        return max(found, key=lambda m: m.member.incarnation)

    def gone(self, rank: int) -> str:
        return self.member(Role.WORKER, rank).gone

    def start_shard(self, index: int, name: str = "", **changes: Any) -> None:
        ready_file = self.folder / (name or f"shard-{index}")
        config = ShardConfig(
            shard=index,
            coordinator=self.address,
            threads=1,
            connect_timeout_seconds=60.0,
            ready_file=ready_file,
            checkpoint_dirs=self.checkpoint_dirs,
        )
        if self.lab:
            config = replace(config, security=self.lab.settings(f"shard-{index}"))
        config = replace(config, **changes)
        stop = asyncio.Event()
        served = asyncio.run_coroutine_threadsafe(serve_shard(config, stop), self.loop.loop)
        self._shards.append(RunningShard(stop, served, ready_file))

    def wait_for_shards(self) -> None:
        wait_until(lambda: all(shard.ready_file.exists() or shard.served.done() for shard in self._shards))

    def stop_shard(self, index: int) -> None:
        """Stop one of the shards, in the order they were started."""
        self.wait_for_shards()
        shard = self._shards.pop(index)
        self.loop.loop.call_soon_threadsafe(shard.stop.set)
        shard.served.result(60)
        shard.ready_file.unlink()

    def stop_shards(self) -> None:
        self.wait_for_shards()
        for shard in self._shards:
            self.loop.loop.call_soon_threadsafe(shard.stop.set)
        for shard in self._shards:
            shard.served.result(60)

    def config(self, role: Role = Role.WORKER, rank: int | None = None, transport: str = "auto") -> WorkerConfig:
        config = WorkerConfig(self.address, role, rank, "cpu", transport=transport)
        if self.lab is None:
            return config
        access = AccessRole.WORKER if role is Role.WORKER else AccessRole.READER
        return replace(config, security=self.lab.settings(access.value, role=access))

    def cluster(
        self,
        role: Role = Role.WORKER,
        rank: int | None = None,
        transport: str = "auto",
        *,
        take_over: bool = False,
        host: int | None = None,
        per_host: PerHost = True,
    ) -> Cluster:
        """A member that leaves, at the latest, at the end of the test.

        ``host``: it pushes together with others of this number, 0 or 1, as ``per_host`` says.
        """
        config = replace(self.config(role, rank, transport=transport), take_over=take_over)
        if host is not None:
            # Workers that name the coordinator otherwise do not find each other.
            port = self.address.rpartition(":")[2]
            config = replace(
                config, per_host=per_host, coordinator=f"{('127.0.0.1', 'localhost', '127.0.0.2')[host]}:{port}"
            )
        cluster = Cluster(Session.join(config))
        self.exits.callback(cluster.close)
        return cluster


@contextmanager
def running_job(
    shards: int = 1,
    workers: int = 1,
    start_shards: int | None = None,
    *,
    checkpoints: CheckpointConfig | None = None,
    saved: Checkpoint | None = None,
    lab: CertificateFolder | None = None,
    **settings: Any,
) -> Iterator[Job]:
    """A coordinator on a free port of 127.0.0.1 with ``start_shards`` (default: all) of its shards."""
    with LoopThread() as loop, ExitStack() as exits:
        cluster = ClusterSettings(
            shards, workers, **{"heartbeat_seconds": 0.1, "seed": 11, "job_id": "job", **settings}
        )
        access = CoordinatorAccess.of(security_of(lab, "coordinator") if lab else OFF)
        driver = Driver(cluster, saved=saved, open_shard=access.open_shard)
        driver.certificate_ends = ExpiryWatch(access.security).ends

        async def serving_checkpoints() -> Checkpoints:
            return Checkpoints(driver, checkpoints or CheckpointConfig())

        made = loop.run(serving_checkpoints())
        service = CoordinatorService(driver, made, sessions=access.sessions, kept_request=KeptRequest())
        services = [(SERVICE_NAME, service.register)]
        server = loop.run(grpc_server.start("127.0.0.1", 0, services, authorization=access.authorization))

        async def start() -> None:
            driver.start()

        loop.run(start())
        with CoordinatorClient(server.address, security_of(lab, "admin") if lab else OFF) as client:
            folder = Path(exits.enter_context(TemporaryDirectory()))
            used = [checkpoints.directory if checkpoints else None, saved.folder.parent if saved else None]
            roots = tuple(root for root in used if root)
            job = Job(loop, server.address, client, ExitStack(), folder, made, roots, lab)
            exits.callback(lambda: loop.run(server.stop(0.2)))
            exits.callback(lambda: loop.run(driver.close()))
            exits.callback(job.stop_shards)
            exits.callback(job.exits.close)
            for index in range(shards if start_shards is None else start_shards):
                job.start_shard(index)
            job.wait_for_shards()
            yield job
            exits.close()


def together(*calls: Callable[[], T]) -> list[T]:
    """Run the calls at the same time, each in a thread; their results in order, or the first exception."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result(120) for future in [threads.submit(call) for call in calls]]
