"""A shard that may be followed, and its follower, in this process: the test plays the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import torch

from ps_protocol.cluster.view import ClusterView, Member, Role, StandbyReport
from ps_protocol.errors import Unavailable
from ps_protocol.model.spec import ShardMap
from ps_protocol.tracing.tracer import Tracer
from ps_server.cli.options.storage import Durability, SnapshotRule, StorageConfig
from ps_server.failpoints import Failpoints
from ps_server.serving import grpc_server
from ps_server.shard.access import Fence
from ps_server.shard.config import Acknowledge, SideChannelConfig
from ps_server.shard.context import ShardContext
from ps_server.shard.counters import Counters
from ps_server.shard.durability.replication import Replication
from ps_server.shard.durability.storage import Storage
from ps_server.shard.execution.executor import ShardExecutor
from ps_server.shard.registry import Registry
from ps_server.shard.service import SERVICE, ShardService
from ps_server.shard.standby.follower import LogFollower, StandbyPlace
from ps_server.shard.standby.log_feed import LogFeed
from ps_server.shard.transport.side_channels import SideChannels
from ps_server.state.model_state import ModelState
from tests.support.loops import LoopThread
from tests.support.shards import TOKEN, TestShard, wait_until

NEVER = SnapshotRule(seconds=1e9)
OFTEN = SnapshotRule(seconds=0.01)
INCARNATION = 100
STANDBY = 7
DIRECTORY = "its standby"


class Primary(TestShard):
    """A shard with its feed."""

    storage: Storage
    feed: LogFeed
    replication: Replication
    words: list[StandbyReport]

    @property
    def log(self):
        return self.storage.kept[1]

    def covered(self) -> None:
        """Wait until the coordinator would know that the standby has everything."""
        wait_until(lambda: bool(self.words) and self.words[-1].directory != "")

    def look(self, standby: int | None) -> None:
        """Show the feed a view with the standby of this incarnation, or none."""
        members = () if standby is None else (Member(Role.STANDBY, 0, standby),)

        async def show() -> None:
            self.feed.on_view(ClusterView(revision=1 << 40, members=members))

        self.loop.run(show())


@contextmanager
def primary(
    path: Path,
    acknowledge: Acknowledge = Acknowledge.BEFORE,
    rule: SnapshotRule = NEVER,
    incarnation: int = INCARNATION,
    tracer: Tracer | None = None,
) -> Iterator[Primary]:
    """Serve shard 0 from ``path`` as ``incarnation``."""

    async def fetch(name: str) -> ShardMap:
        raise AssertionError(name)

    with LoopThread() as loop, ExitStack() as closing:
        executor = ShardExecutor(1)
        closing.callback(executor.close)
        config = StorageConfig(Durability.DURABLE, path, snapshots=rule)
        storage = loop.run(Storage.open(0, config, executor))
        closing.callback(lambda: loop.run(storage.close(snapshot=False)))
        failpoints, counters = Failpoints(), Counters()
        replication = Replication(storage.log, acknowledge)
        rows = storage.row_memory
        context = ShardContext(0, executor, fetch, storage.log, failpoints, replication, tracer=tracer, row_memory=rows)
        registry = Registry(context, storage.recovered)
        shard = Primary(loop, registry, failpoints, counters, storage)
        shard.replication, shard.words = replication, []

        async def begin() -> SideChannels:
            storage.begin(incarnation, lambda: registry.kept)
            shard.feed = LogFeed(0, registry, storage.kept[1], replication)
            shard.feed.begin(incarnation, shard.words.append)
            return SideChannels(SideChannelConfig())

        side_channels = loop.run(begin())
        closing.callback(lambda: loop.run(side_channels.close()))
        fence = Fence(0, registry)
        fence.begin(incarnation, TOKEN)
        service = shard.service = ShardService(0, registry, counters, side_channels, shard.feed, fence)
        server = loop.run(grpc_server.start("127.0.0.1", 0, [(SERVICE, service.register)]))
        closing.callback(lambda: loop.run(server.stop(0.2)))
        closing.callback(lambda: loop.run(shard.feed.close(Unavailable("closing"))))
        shard.address = server.address
        shard.others = (Member(Role.STANDBY, 0, STANDBY),)
        shard.set_view({0: 1})
        with grpc.insecure_channel(server.address) as shard.channel:
            yield shard


class Following:
    """A follower on a loop of its own."""

    def __init__(self, loop: LoopThread, storage: Storage, executor: ShardExecutor) -> None:
        self.loop = loop
        self.storage = storage
        self.follower = LogFollower(0, storage, executor)
        self._task: asyncio.Task[None] | None = None

    def begin(self, shard: Primary, incarnation: int = INCARNATION, number: int = 0) -> None:
        async def begin() -> None:
            place = StandbyPlace(Member(Role.STANDBY, number, STANDBY), shard.view.revision)
            holder = Member(Role.SHARD, 0, incarnation, shard.address)
            self._task = asyncio.create_task(self.follower.follow(holder, place))

        self.loop.run(begin())

    def end(self) -> BaseException | None:
        """Stop following; what ended it before, if anything did."""

        async def end() -> BaseException | None:
            assert self._task is not None
            self._task.cancel()
            await asyncio.wait([self._task])
            return None if self._task.cancelled() else self._task.exception()

        return self.loop.run(end())

    def ended(self) -> BaseException:
        """Wait until it has ended by itself; why."""
        wait_until(lambda: self._task is not None and self._task.done())
        error = self.end()
        assert error is not None
        return error

    def reach(self, shard: Primary) -> None:
        """Wait until it has everything the shard has."""
        wait_until(lambda: self.follower.incarnation != 0 and self.follower.number == shard.log.whole)

        async def settled() -> None:
            await self.follower.settled()

        self.loop.run(settled())

    def model(self, name: str = "model") -> ModelState:
        return self.storage.recovered[name]

    @property
    def values(self) -> torch.Tensor:
        return self.model().replica.region.data


@contextmanager
def follower(path: Path, rule: SnapshotRule = NEVER) -> Iterator[Following]:
    """One with the data in ``path``."""
    with LoopThread() as loop, ExitStack() as closing:
        executor = ShardExecutor(1)
        closing.callback(executor.close)
        config = StorageConfig(Durability.DURABLE, path, snapshots=rule)
        storage = loop.run(Storage.open(0, config, executor))
        closing.callback(lambda: loop.run(storage.close(snapshot=False)))
        following = Following(loop, storage, executor)
        yield following
        if following._task is not None:
            following.end()
