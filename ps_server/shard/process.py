"""Serves one shard: opens its data directory, takes its place, and serves or follows until the place is lost."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from contextlib import suppress
from copy import copy
from dataclasses import replace

import grpc

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.client.membership import Membership
from ps_protocol.cluster.view import ClusterView, JoinRequest, MemberStats, Role
from ps_protocol.errors import DamagedData, Fenced, InternalError, Unavailable
from ps_protocol.logs import EventLogger, describe_process
from ps_protocol.metrics.call_on_loop import call_on_loop
from ps_protocol.metrics.server import JOB_LABEL, MetricsServer
from ps_protocol.model.spec import ShardMap
from ps_protocol.rpc.channel import open_async_channel
from ps_protocol.security.credentials import SessionCredential
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import OFF, Security
from ps_protocol.times import END_SECONDS, REPEATED_CALL_SECONDS
from ps_protocol.tracing.settings import make_tracer
from ps_server.checkpoint.directory import CheckpointRoots
from ps_server.limits import LimitCounts
from ps_server.serving import grpc_server
from ps_server.serving.authorization import Authorization
from ps_server.serving.metrics import serve_metrics
from ps_server.shard import times
from ps_server.shard.access import Fence
from ps_server.shard.byte_budget import ByteBudgets
from ps_server.shard.config import Acknowledge, ShardConfig
from ps_server.shard.context import ShardContext
from ps_server.shard.counters import Counters
from ps_server.shard.durability.replication import Replication
from ps_server.shard.durability.storage import Storage
from ps_server.shard.execution.executor import ShardExecutor
from ps_server.shard.execution.watchdog import Watchdog
from ps_server.shard.metrics import SHARD, ShardMetrics, shard_stats
from ps_server.shard.registry import Registry
from ps_server.shard.rows_service import RowExpiry
from ps_server.shard.service import SERVICE, ShardService
from ps_server.shard.standby.follower import LogFollower
from ps_server.shard.standby.log_feed import LogFeed
from ps_server.shard.standby.standby import Standby, joined
from ps_server.shard.transport.side_channels import SideChannels
from ps_server.tables.arrays import machine_bytes
from ps_server.tasks import first_of

logger = EventLogger(__name__)


async def serve(config: ShardConfig, stop: asyncio.Event) -> None:
    """Serve shard ``config.shard`` until ``stop``; as a standby, follow it for as long as another process serves it.

    Raises PsError when it cannot listen, join, or stay a member. A standby that lost its place starts over instead, and
    so does a shard with a data directory, one of whose rows on disk is not what was written.
    """
    security = Security(config.security, AccessRole.SERVER, listens=True)
    client = CoordinatorClient(config.coordinator, security)
    try:
        while True:
            process = ShardProcess(config, client, stop, security)
            try:
                await process.run()
                return
            except (Fenced, InternalError) as error:
                if not config.standby or stop.is_set():
                    raise
                logger.warning("standby.failed", "shard %d starts over as a standby: %s", config.shard, error)
            except DamagedData as error:
                if not process.is_damaged or stop.is_set():
                    raise
                logger.error("table.disk", "shard %d reads its rows from snapshot and log: %s", config.shard, error)
            del process
            gc.collect()  # Two tables may not fit.
            await first_of(stop.wait(), seconds=times.RETRY_SECONDS)
    finally:
        client.close()


class ShardProcess:
    """One opening of the data directory: everything from there to its closing, on the shard's event loop."""

    def __init__(
        self, config: ShardConfig, client: CoordinatorClient, stop: asyncio.Event, security: Security = OFF
    ) -> None:
        self._config = config
        self._client = client
        self._stop = stop
        self._security = security
        self._authorization = Authorization(security)
        #: The session of the present membership, as a standby or a shard.
        self._session = SessionCredential()
        self._counters = Counters()
        #: Of this opening.
        self.limit_counts = LimitCounts()
        #: End with a snapshot, and some grace for calls in progress; not where another process has taken over.
        self._gently = True
        #: Set where state is kept.
        self._membership: Membership | None = None
        self._announced: asyncio.Future[None] | None = None
        self._metrics: MetricsServer | None = None
        #: None: it is written.
        self._ready_file = config.ready_file
        #: Which row on disk is not what was written, once one is.
        self._damage: DamagedData | None = None
        self._damaged = asyncio.Event()

    @property
    def is_damaged(self) -> bool:
        """Whether a row on disk is not what was written, and snapshot and log have it."""
        return self._damage is not None

    async def run(self) -> None:
        """Run until stopped. Raises PsError."""
        config = self._config
        watchdog = Watchdog(config.stuck_seconds) if config.stuck_seconds else None
        if watchdog:
            watchdog.start()
        try:
            await self._run(ShardExecutor(config.threads, watchdog))
        finally:
            if watchdog:
                watchdog.close()

    def announce_ready(self, address: str) -> None:
        """Write the ready file, once: a standby that takes over has its address still, its pipe perhaps no reader."""
        if self._ready_file is not None:
            grpc_server.write_ready_file(self._ready_file, address)
            self._ready_file = None

    async def _run(self, executor: ShardExecutor) -> None:
        config = self._config
        try:
            tracer = make_tracer(os.environ, f"shard {config.shard}")
            storage = await Storage.open(config.shard, config.storage, executor)
        except BaseException:
            executor.close()
            raise
        replication = Replication(storage.log, config.acknowledge)
        registry = Registry(
            ShardContext(
                config.shard,
                executor,
                self._fetch,
                storage.log,
                config.failpoints,
                replication,
                self._announce_state,
                storage.keep,
                lambda: storage.promised,
                config.max_model_bytes or machine_bytes(),
                storage.row_memory,
                ByteBudgets.of(config.limits.answer_mb << 20, config.limits.upload_mb << 20, self.limit_counts),
                CheckpointRoots.of(config.checkpoint_dirs),
                config.limits,
                self.limit_counts,
                not self._security.authenticates,
                self._open_shard,
                tracer,
            ),
            storage.recovered,
        )
        if storage.directory:
            self._watch_rows(storage, registry)
        feed = LogFeed(config.shard, registry, storage.kept[1], replication) if storage.kept else None
        side_channels = SideChannels(config.side_channels, self._security, self.limit_counts)
        fence = Fence(config.shard, registry)
        service = ShardService(
            config.shard,
            registry,
            self._counters,
            side_channels,
            feed,
            fence,
            storage.folder,
            sync=config.storage.fsync,
        )
        metrics = ShardMetrics(self._counters, registry, executor, storage, service, feed)
        server = None
        try:
            await asyncio.to_thread(service.weights.recover)
            server = await grpc_server.start(
                config.bind,
                config.port,
                [(SERVICE, service.register)],
                authorization=self._authorization,
                limits=config.limits,
                limit_counts=self.limit_counts,
            )
            read = call_on_loop(asyncio.get_running_loop(), metrics.read)
            self._metrics = serve_metrics(
                config.metrics, SHARD.role, read, {SHARD.constant: str(config.shard)}, security=self._security
            )
            address = config.advertise or server.address
            membership = await self._place(storage, executor, address)
            if membership is not None:
                self._enter(membership)
                fence.begin(membership.member.incarnation, membership.token)
                metrics.serving = True
                await self._hold(membership, address, storage, registry, feed)
        except (Fenced, DamagedData):
            self._gently = False
            raise
        finally:
            metrics.serving = False
            if feed:
                await feed.stop()
            if server:
                await server.stop(END_SECONDS if self._gently else 0.0)
            if feed:
                await feed.close(Unavailable(f"shard {config.shard} stops"))
            await service.weights.close()
            await side_channels.close()
            await registry.peers.close()
            await registry.sources.close()
            if self._metrics:
                await asyncio.to_thread(self._metrics.close)
            await storage.close(snapshot=self._gently)
            executor.close()
            if tracer:
                tracer.close()

    def _watch_rows(self, storage: Storage, registry: Registry) -> None:
        """Stop all models once a row on disk is not what was written: workers wait until it is read again."""
        loop, thread, shard = asyncio.get_running_loop(), threading.get_ident(), self._config.shard

        def stop(error: DamagedData) -> None:
            if self._damage is None:
                self._damage = error
                self._damaged.set()
                registry.stop(Unavailable(f"shard {shard} reads its rows again: {error.message}", shard=str(shard)))

        def on_damage(error: DamagedData) -> None:
            if threading.get_ident() == thread:
                stop(error)
                return
            with suppress(RuntimeError):  # The loop has ended.
                loop.call_soon_threadsafe(stop, error)

        storage.row_memory.on_damage = on_damage

    def _enter(self, membership: Membership) -> None:
        """From now on this process calls others, and is called, as this member."""
        self._session = self._client.sessions.of(membership.member)
        self._authorization.trust(self._client.sessions.public_key)
        if membership.job:
            describe_process(job=membership.job)
            if self._metrics:
                self._metrics.label(**{JOB_LABEL: membership.job})

    def _enter_standby(self, membership: Membership) -> None:
        self._enter(membership)
        membership.set_stats(lambda: MemberStats(metrics_address=self._metrics_address))

    @property
    def _metrics_address(self) -> str:
        return self._metrics.address if self._metrics else ""

    def _open_shard(self, address: str) -> grpc.aio.Channel:
        return open_async_channel(address, self._security, self._session)

    async def _fetch(self, model: str) -> ShardMap:
        return await asyncio.to_thread(self._client.get_shard_map, model)

    async def _announce_state(self) -> None:
        """Once, before this directory holds anything that could be lost: from then on older copies are refused.

        One that is empty announces nothing: started by mistake it must not lock the right one out.
        """
        if self._membership is None:
            return
        if self._announced is None or (self._announced.done() and self._announced.exception()):
            self._announced = asyncio.ensure_future(asyncio.to_thread(self._membership.announce_state))
        await asyncio.shield(self._announced)

    async def _place(self, storage: Storage, executor: ShardExecutor, address: str) -> Membership | None:
        """Wait for the membership as shard; None if stopped before."""
        config = self._config
        spec = JoinRequest(
            Role.SHARD,
            config.shard,
            address,
            data_incarnation=storage.incarnation,
            directory=storage.directory,
            add=config.add,
            take_over=config.take_over,
        )
        if not config.standby:
            return await joined(self._client, spec, config.connect_timeout_seconds, self._stop)
        follower = LogFollower(config.shard, storage, executor, self._open_shard)
        standby = Standby(self._client, spec, follower, config.connect_timeout_seconds, self._stop)
        standby.exits_with_job = config.exit_when_finished
        standby.on_join = self._enter_standby
        taking = asyncio.create_task(standby.take_place())
        await first_of(taking, standby.waits.wait())
        if standby.waits.is_set():
            self.announce_ready(address)
        membership = await taking
        if follower.followed:
            storage.promised = config.acknowledge is Acknowledge.AFTER
        await storage.give_up_snapshots()
        return membership

    async def _hold(
        self, membership: Membership, address: str, storage: Storage, registry: Registry, feed: LogFeed | None
    ) -> None:
        """Serve until stopped. Raises Fenced when another process took this shard's place, and DamagedData for a row on
        disk that is not what was written.
        """
        config = self._config
        aging: asyncio.Task[None] | None = None
        try:
            registry.recover(storage.recovered)
            incarnation = membership.member.incarnation
            describe_process(incarnation=incarnation)
            if storage.begin(incarnation, lambda: registry.kept):
                self._membership = membership
                if storage.recovered:
                    await self._announce_state()
                if feed:
                    feed.begin(incarnation, lambda word: membership.report_standby(word, REPEATED_CALL_SECONDS))
            aging = asyncio.create_task(RowExpiry(lambda: registry.models).run(), name="aging")
            logger.info("server.started", "shard %d serves on %s", config.shard, address)
            self.announce_ready(address)
            await self._follow(membership, storage, registry, feed)
            if feed and feed.followed:
                self._gently = False
                registry.stop(Unavailable(f"shard {config.shard} hands over to its standby", shard=str(config.shard)))
                await feed.hand_over()
        except Fenced as error:
            gone = Unavailable(f"shard {config.shard} lost its place here: {error.message}", shard=str(config.shard))
            registry.stop(gone)
            if feed:
                await feed.close(gone)
            raise
        finally:
            if aging:
                aging.cancel()
            await asyncio.to_thread(membership.leave, "stopped")

    async def _follow(self, membership: Membership, storage: Storage, registry: Registry, feed: LogFeed | None) -> None:
        """Follow the cluster's views until stopped. Raises Fenced, and DamagedData for a row on disk."""
        loop = asyncio.get_running_loop()
        fenced: asyncio.Future[Fenced] = loop.create_future()

        def show(view: ClusterView) -> None:
            registry.on_view(view)
            if feed:
                feed.on_view(view)
            if view.released and self._config.exit_when_finished:
                logger.info("server.stopping", "the job is finished: stopping")
                self._stop.set()

        def on_view(view: ClusterView) -> None:
            loop.call_soon_threadsafe(show, view)

        def on_fenced(error: Fenced) -> None:
            loop.call_soon_threadsafe(fenced.set_result, error)

        def stats() -> MemberStats:
            return replace(
                shard_stats(self._counters, registry),
                standby_lag=feed.lag if feed else None,
                log=storage.counts,
                metrics_address=self._metrics_address,
            )

        membership.set_stats(stats)
        await asyncio.to_thread(membership.subscribe, on_view, on_fenced)
        await first_of(fenced, self._stop.wait(), self._damaged.wait())
        if fenced.done():
            raise fenced.result()
        if self._damage is not None:
            raise copy(self._damage)
