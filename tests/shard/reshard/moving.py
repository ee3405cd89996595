"""Several real shards in this process, and a test that plays their coordinator: it moves slices between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import torch

from ps_protocol.cluster.view import ClusterView, Member, Role, StandbyReport
from ps_protocol.errors import NotReady, Unavailable
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import Consistency, DType, Kind, ModelSpec, ShardMap, Slice, Variable
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.v1 import shard_pb2_grpc
from ps_protocol.wire.convert.model import SHARD_MAP
from ps_server.cli.options.storage import Durability, SnapshotRule, StorageConfig
from ps_server.failpoints import Failpoints
from ps_server.serving import grpc_server
from ps_server.shard.access import Fence
from ps_server.shard.config import SideChannelConfig
from ps_server.shard.context import ShardContext
from ps_server.shard.counters import Counters
from ps_server.shard.durability.replication import Replication
from ps_server.shard.durability.storage import Storage
from ps_server.shard.execution.executor import ShardExecutor
from ps_server.shard.registry import Registry
from ps_server.shard.service import SERVICE, ShardService
from ps_server.shard.standby.log_feed import LogFeed
from ps_server.shard.step.model import ShardModel
from ps_server.shard.transport.side_channels import SideChannels
from ps_server.state.region import Region
from ps_server.tables.bucket_contents import BucketContents
from tests.shard.disks import copy_of
from tests.support.loops import LoopThread
from tests.support.shards import TOKEN, TestShard, coordinator_stub, in_slices, load

NEVER = SnapshotRule(seconds=1e9)
OFTEN = SnapshotRule(seconds=0.01)
MOVE = "move"

#: (variable, first row, end row): five slices of three variables.
ROWS = ((0, 0, 2), (0, 2, 4), (0, 4, 6), (1, 0, 5), (2, 0, 3))


def spec_of(optimizer: str = "SGD", **options: Any) -> ModelSpec:
    """A matrix that is cut in three, a vector, and a buffer."""
    variables = (
        Variable("matrix", (6, 4), DType.FLOAT32),
        Variable("vector", (5,), DType.FLOAT32),
        Variable("mean", (3,), DType.FLOAT32, Kind.BUFFER),
    )
    return ModelSpec("model", f"torch.optim.{optimizer}", variables, ({"lr": 0.1} | options,))


def map_of(
    spec: ModelSpec, places: Sequence[int], epoch: int = 1, shards: int = 3, tables: Sequence[Sequence[int]] = ()
) -> ShardMap:
    """The slices of ``ROWS``, and the buckets of every table, on these shards."""
    slices = tuple(Slice(*rows, shard) for rows, shard in zip(ROWS, places, strict=True))
    return ShardMap(epoch, spec, shards, slices, tables=tuple(map(tuple, tables)))


def gradients_of(spec: ModelSpec, seed: int) -> list[torch.Tensor]:
    """What a worker pushes: gradients of parameters, values of buffers."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(variable.shape, generator=generator) for variable in spec.variables]


def payload_of(layout: Layout, tensors: Sequence[torch.Tensor]) -> bytes:
    """The rows that this layout has, each slice with its padding."""
    return in_slices(tensors[s.slice.variable][s.slice.row_begin : s.slice.row_end] for s in layout.slices)


class Node(TestShard):
    """One shard."""

    number: int
    incarnation: int
    path: Path | None
    replication: Replication
    #: What the coordinator hears of its standby.
    words: list[StandbyReport]
    #: Models whose shard maps it has asked for.
    asked: list[str]

    @property
    def log(self) -> Any:
        return self.storage.log

    @property
    def stub(self) -> shard_pb2_grpc.ShardStub:
        """As the coordinator has it."""
        return coordinator_stub(self.channel, self.incarnation)

    def show(self, view: ClusterView) -> None:
        self.view = view

        async def show() -> None:
            self.registry.on_view(view)

        self.loop.run(show())


class Job:
    """The shards, and what their coordinator would know."""

    def __init__(self, stack: ExitStack, live: Mapping[int, int], consistency: Consistency) -> None:
        self._stack = stack
        self.loop = stack.enter_context(LoopThread())
        self.live = live
        self.consistency = consistency
        self.nodes: dict[int, Node] = {}
        self.maps: dict[str, ShardMap] = {}
        #: Models that were released, with the last epochs of their shard maps.
        self.released: dict[str, int] = {}
        #: Epochs of models in views, where shards are told of the shard maps of ``maps`` too early.
        self.shown: dict[str, int] | None = None
        self.moving = ""
        self.revision = 0
        #: Members beside workers and shards: a standby of shard 0.
        self.others: tuple[Member, ...] = (Member(Role.STANDBY, 0, 7),)

    # -- shards

    def start(self, number: int, path: Path | None = None, **storage: Any) -> Node:
        """Start a shard, in the place of the one before it."""
        rule = storage.pop("rule", NEVER)
        config = StorageConfig(storage.pop("durability", Durability.DURABLE), path, snapshots=rule) if path else None
        executor, counters, failpoints = ShardExecutor(1), Counters(), Failpoints()
        self._stack.callback(executor.close)
        kept = self.loop.run(Storage.open(number, config or StorageConfig(), executor))
        self._stack.callback(lambda: self.loop.run(kept.close(snapshot=False)))

        asked: list[str] = []

        async def fetch(name: str) -> ShardMap:
            asked.append(name)
            return self.maps[name]

        replication = Replication(kept.log)
        context = ShardContext(
            number,
            executor,
            fetch,
            kept.log,
            failpoints,
            replication,
            keep=kept.keep,
            row_memory=kept.row_memory,
        )
        registry = Registry(context, kept.recovered)
        node = Node(self.loop, registry, failpoints, counters, kept)
        node.number, node.path, node.incarnation = number, path, 100 + number
        node.replication, node.words, node.asked = replication, [], asked

        async def begin() -> tuple[SideChannels, LogFeed | None]:
            kept.begin(node.incarnation, lambda: registry.kept)
            feed = LogFeed(number, registry, kept.kept[1], replication) if kept.kept else None
            if feed:
                feed.begin(node.incarnation, node.words.append)
            return SideChannels(SideChannelConfig()), feed

        channels, feed = self.loop.run(begin())
        self._stack.callback(lambda: self.loop.run(channels.close()))
        fence = Fence(number, registry)
        fence.begin(node.incarnation, TOKEN)
        service = ShardService(number, registry, counters, channels, feed, fence)
        server = self.loop.run(grpc_server.start("127.0.0.1", 0, [(SERVICE, service.register)]))
        self._stack.callback(lambda: self.loop.run(server.stop(0.2)))
        if feed:
            self._stack.callback(lambda: self.loop.run(feed.close(Unavailable("closing"))))
        node.address = server.address
        node.channel = self._stack.enter_context(grpc.insecure_channel(server.address))
        self.nodes[number] = node
        node.show(self.view)
        return node

    @property
    def view(self) -> ClusterView:
        return ClusterView(
            revision=self.revision,
            members=(
                *(Member(Role.WORKER, rank, incarnation) for rank, incarnation in self.live.items()),
                *self.others,
                *(Member(Role.SHARD, n, node.incarnation, node.address) for n, node in self.nodes.items()),
            ),
            consistency=self.consistency,
            models=self.shown or {name: shard_map.epoch for name, shard_map in self.maps.items()},
            expected_shards=len(self.nodes) or 1,
            started=True,
            moving=self.moving,
            released_models=dict(self.released),
        )

    def show(self, *numbers: int) -> None:
        """Show a new view to these shards, else to all."""
        self.revision += 1
        for node in self.nodes.values():
            if not numbers or node.number in numbers:
                node.show(self.view)

    # -- the model

    def declare(self, shard_map: ShardMap) -> None:
        """Place a model on all shards, and give it values: those of step 0."""
        self.maps[shard_map.spec.name] = shard_map
        self.show()
        values = gradients_of(shard_map.spec, 0)
        for number in self.nodes:
            model = self.model(number, name=shard_map.spec.name)
            if model.layout.holds_any:
                region = Region(model.layout)
                for index, span in enumerate(model.layout.slices):
                    rows = values[span.slice.variable][span.slice.row_begin : span.slice.row_end]
                    region.slice(index).copy_(rows)
                payload = b"".join(bytes(region.bytes[a:b]) for a, b in model.layout.ranges())
                assert load(self.nodes[number], model, payload).written

    def release(self, name: str) -> None:
        """Decide that a model is dropped, and let every shard know."""
        self.released[name] = self.maps.pop(name).epoch
        self.show()

    def model(self, number: int, epoch: int = 0, name: str = "model") -> ShardModel:
        async def model() -> ShardModel:
            while True:
                with suppress(NotReady):  # On a busy machine it takes its time to be placed.
                    return await self.nodes[number].registry.model(name, epoch or self.maps[name].epoch)

        return self.loop.run(model())

    @property
    def holders(self) -> list[int]:
        return self.maps["model"].holders

    def values(self) -> dict[tuple[int, int], torch.Tensor]:
        """Every slice by variable and first row, wherever it lies."""
        found = {}
        for number in self.holders:
            model = self.model(number)
            published, give_back = self.nodes[number].take(model)
            for index, span in enumerate(model.layout.slices):
                found[span.slice.variable, span.slice.row_begin] = published.region.slice(index).clone()
            give_back()
        assert len(found) == len(ROWS)
        return found

    def state(self) -> dict[tuple[int, int, str], torch.Tensor]:
        """The optimizer state of every slice."""

        async def of(model: ShardModel) -> list[Any]:
            async with model.save() as (_, entries):
                return entries

        found = {}
        for number in self.holders:
            model = self.model(number)
            for key, tensor in self.loop.run(of(model)):
                piece = model.layout.slices[key.slice_index].slice
                found[piece.variable, piece.row_begin, key.name] = tensor
        return found

    # -- the move, step by step

    def begin_move(self) -> None:
        self.moving = MOVE
        self.show()

    def reach(self) -> list[pb.CatchUpReply]:
        """Pause all, then bring all to one point."""
        frozen = {n: node.stub.Pause(pb.PauseRequest(quiesce=MOVE, seconds=60)) for n, node in self.nodes.items()}
        furthest: dict[tuple[int, int], int] = {}
        for number in self.holders:
            for accepted in (a for model in frozen[number].models for a in model.accepted):
                worker = accepted.worker.rank, accepted.worker.incarnation
                furthest[worker] = max(furthest.get(worker, 0), accepted.sequence)
        accepted = [
            pb.WorkerSequence(worker=pb.WorkerId(rank=r, incarnation=i), sequence=s) for (r, i), s in furthest.items()
        ]
        request = pb.CatchUpRequest(quiesce=MOVE, models=[pb.ModelCut(model="model", accepted=accepted)], seconds=60)
        return [node.stub.CatchUp(request) for node in self.nodes.values()]

    def prepare(self, number: int, *wanted: ShardMap) -> pb.StageReshardReply:
        request = pb.StageReshardRequest(
            quiesce=MOVE,
            membership_revision=self.revision,
            models=map(SHARD_MAP.to_pb, wanted),
        )
        return self.nodes[number].stub.StageReshard(request, timeout=30)

    def prepare_all(self, *wanted: ShardMap) -> None:
        """Bring all to one point, and let each get what comes to it; nothing is decided yet."""
        self.begin_move()
        self.reach()
        for number in self.nodes:
            self.prepare(number, *wanted)

    def commit(self, *wanted: ShardMap) -> None:
        """Decide, and let every shard know; returns when all serve by the new maps."""
        self.maps |= {shard_map.spec.name: shard_map for shard_map in wanted}
        self.moving = ""
        self.show()
        for number in self.nodes:
            for shard_map in wanted:
                self.model(number, shard_map.epoch, shard_map.spec.name)

    def abort(self) -> None:
        """As a coordinator does: those that have not prepared would wait for their time to be up."""
        self.moving = ""
        self.show()
        for node in self.nodes.values():
            node.stub.Resume(pb.ResumeRequest(quiesce=MOVE))

    def rows(self) -> list[BucketContents]:
        """Every bucket of every table, wherever it lies."""
        return [
            self.loop.run(self.model(number).copy_buckets(iter([(table, bucket)])))[1][0][1]
            for table, places in enumerate(self.maps["model"].tables)
            for bucket, number in enumerate(places)
        ]

    def next_map(self, places: Sequence[int], tables: Sequence[Sequence[int]] | None = None) -> ShardMap:
        """``tables`` None: buckets stay."""
        held = self.maps["model"]
        return map_of(held.spec, places, held.epoch + 1, held.shards, held.tables if tables is None else tables)

    def move(self, places: Sequence[int], tables: Sequence[Sequence[int]] | None = None) -> ShardMap:
        """All of it, undisturbed."""
        wanted = self.next_map(places, tables)
        self.prepare_all(wanted)
        self.commit(wanted)
        return wanted


@contextmanager
def job(
    spec: ModelSpec,
    places: Sequence[int],
    shards: int = 3,
    *,
    path: Path | None = None,
    live: Mapping[int, int] | None = None,
    consistency: Consistency | None = None,
    tables: Sequence[Sequence[int]] = (),
    **storage: Any,
) -> Iterator[Job]:
    """A job of ``shards`` shards with this model on them; on disk where there is a ``path``."""
    with ExitStack() as stack:
        made = Job(stack, live or {0: 1}, consistency or Consistency())
        for number in range(shards):
            made.start(number, path / f"of-{number}" if path else None, **storage)
        made.declare(map_of(spec, places, shards=shards, tables=tables))
        yield made


def crash_image(node: Node, point: str, target: Path) -> Callable[[], bool]:
    """When ``node`` passes ``point``, its directory is copied to ``target``; returns whether that has happened."""
    assert node.path is not None
    source, seen = node.path, []

    def copy() -> None:
        copy_of(source, target)
        seen.append(True)
        node.failpoints.disarm(point)

    node.failpoints.arm(point, copy)
    return lambda: bool(seen)
