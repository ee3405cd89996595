"""Shards without tensors that hold still, prepare and switch as real ones do, and fail where a test says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from ps_protocol.cluster.view import ClusterView, Joined, JoinRequest, Role
from ps_protocol.errors import PsError, Unavailable
from ps_protocol.v1 import common_pb2, shard_pb2_grpc
from ps_protocol.v1 import shard_pb2 as pb
from ps_server.coordinator.driver import Driver
from ps_server.serving import grpc_server
from ps_server.serving.rpc_errors import translated


class FakeShard(shard_pb2_grpc.ShardServicer):
    """One shard. It takes what it knows of models and moves from the driver's view, as it is when it is asked."""

    def __init__(self, number: int, driver: Driver) -> None:
        self.number = number
        self.driver = driver
        self.joined: Joined | None = None
        #: What the next calls of a method raise, or do before they are answered.
        self.fails: defaultdict[str, list[PsError | Callable[[], object]]] = defaultdict(list)
        self.calls: list[str] = []
        #: The quiesce that pauses it.
        self.quiesce = ""
        #: Whether it has staged a reshard at it: then nothing but the view resumes it.
        self.bound = False
        #: Epochs it serves by, and those it prepared.
        self.epochs: dict[str, int] = {}
        self.prepared: dict[str, int] = {}
        #: Models without values here.
        self.empty: set[str] = set()
        #: The last push of a worker that this shard has.
        self.sequence = number
        #: Rows in each bucket it holds, by table; 100 bytes each.
        self.bucket_rows: dict[str, int] = {}
        self._server: grpc_server.RunningServer | None = None

    async def start(self, *, add: bool = False) -> None:
        """Serve, and join."""

        def register(server: grpc.aio.Server) -> None:
            shard_pb2_grpc.add_ShardServicer_to_server(self, server)  # type: ignore[no-untyped-call]

        name = pb.DESCRIPTOR.services_by_name["Shard"].full_name
        self._server = await grpc_server.start("127.0.0.1", 0, [(name, register)])
        self.join(add=add)

    def join(self, *, add: bool = False) -> None:
        """As another process that takes the place over, where it held one."""
        assert self._server is not None
        life = 0 if self.joined is None else self.joined.member.incarnation
        token = f"shard {self.number} after {life}"
        ask = JoinRequest(Role.SHARD, self.number, self._server.address, token, add=add, take_over=life > 0)
        self.joined = self.driver.join(ask)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)

    def look(self) -> ClusterView:
        """Follow the view: place new models; when a move that binds this shard is decided, switch or go on."""
        view = self.driver.view
        self.epochs = {name: epoch for name, epoch in self.epochs.items() if not view.was_released(name, epoch)}
        for name, epoch in view.models.items():
            self.epochs.setdefault(name, epoch)
        if self.bound and view.moving != self.quiesce:
            for name, epoch in self.prepared.items():
                if view.models[name] == epoch:
                    self.epochs[name] = epoch
            self._go_on()
        return view

    @property
    def is_open(self) -> bool:
        """Whether it takes pushes."""
        self.look()
        return not self.quiesce

    def _go_on(self) -> None:
        self.quiesce, self.bound, self.prepared = "", False, {}

    def _begin(self, method: str) -> None:
        self.calls.append(method)
        self.look()
        if self.fails[method]:
            failure = self.fails[method].pop(0)
            if isinstance(failure, PsError):
                raise failure
            failure()

    def _standings(self) -> list[pb.ModelCut]:
        accepted = [pb.WorkerSequence(worker=pb.WorkerId(rank=0, incarnation=9), sequence=self.sequence)]
        return [pb.ModelCut(model=name, accepted=accepted) for name in self.epochs if name not in self.empty]

    async def Pause(self, request: pb.PauseRequest, context: Any) -> pb.PauseReply:
        async with translated(context):
            self._begin("Pause")
            assert not self.bound, "a shard that is bound must not be paused by another quiesce"
            self.quiesce = request.quiesce
            return pb.PauseReply(models=self._standings())

    async def CatchUp(self, request: pb.CatchUpRequest, context: Any) -> pb.CatchUpReply:
        async with translated(context):
            self._begin("CatchUp")
            self._check(request.quiesce)
            for model in request.models:
                self.sequence = max(self.sequence, *(accepted.sequence for accepted in model.accepted))
            return pb.CatchUpReply(models=self._standings())

    async def MakeRoom(self, request: pb.MakeRoomRequest, context: Any) -> pb.MakeRoomReply:
        async with translated(context):
            self._begin("MakeRoom")
            assert not self.quiesce, "training goes on while room is made"
            return pb.MakeRoomReply()

    async def StageReshard(self, request: pb.StageReshardRequest, context: Any) -> pb.StageReshardReply:
        async with translated(context):
            self._begin("StageReshard")
            self._check(request.quiesce)
            view = self.look()
            assert view.revision >= request.membership_revision
            if view.moving != request.quiesce:
                raise Unavailable("this move is over")
            self.bound = True
            self.prepared = {shard_map.spec.name: shard_map.epoch for shard_map in request.models}
            return pb.StageReshardReply()

    async def Capture(self, request: pb.CaptureRequest, context: Any) -> AsyncIterator[pb.CaptureReply]:
        async with translated(context):
            self._begin("Capture")
            self._check(request.quiesce)
            self._go_on()
            for _ in ("trains on", "has written"):
                yield pb.CaptureReply()

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.ResumeReply:
        async with translated(context):
            self._begin("Resume")
            if request.quiesce == self.quiesce:
                self._go_on()
            return pb.ResumeReply()

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.ModelStatus:
        async with translated(context):
            self._begin("GetModel")
            shard_map = self.driver.shard_map(request.model)
            tables = []
            for table, owners in zip(shard_map.spec.tables, shard_map.tables, strict=True):
                rows = owners.count(self.number) * self.bucket_rows.get(table.name, 0)
                tables.append(pb.TableStatus(name=table.name, rows=rows, size_bytes=100 * rows, updates=5, evicted=1))
            return pb.ModelStatus(shard_map=common_pb2.ShardMap(epoch=self.epochs[request.model]), tables=tables)

    def _check(self, quiesce: str) -> None:
        if quiesce != self.quiesce:
            raise Unavailable("this shard has gone on")
