"""The gRPC face of a shard: one handler per call, no decisions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import grpc
import torch
from google.protobuf.message import Message

from ps_protocol import PROTOCOL_VERSION
from ps_protocol.cluster.answers import OpenedStream, StepAnswer
from ps_protocol.cluster.model_status import ModelPosition
from ps_protocol.cluster.requests import OpenRequest
from ps_protocol.cluster.transport import Transport
from ps_protocol.cluster.view import Role
from ps_protocol.errors import InvalidRequest, ProtocolVersionMismatch
from ps_protocol.security.roles import METHODS, Fencing
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.chunks import SAVE_REPLIES
from ps_protocol.wire.convert import model as convert_model
from ps_protocol.wire.convert.shard import MODEL_STATUS, POSITION, STATE_HEADER
from ps_protocol.wire.convert.step import request_from_bytes
from ps_server.checkpoint.messages import part_to_pb
from ps_server.consistency import WorkerKey
from ps_server.consistency.tracker_state import position_from_pb, pushes_to_pb, worker_from_pb
from ps_server.log.folder import DataFolder
from ps_server.optimizers.state import describe, tensor_bytes
from ps_server.serving.authorization import check_member
from ps_server.serving.rpc_errors import parsed, translated
from ps_server.shard.access import Fence, OpenChecks
from ps_server.shard.byte_budget import READERS
from ps_server.shard.change_feed import ChangeFeed
from ps_server.shard.counters import Counters
from ps_server.shard.quiesce import Quiescence
from ps_server.shard.registry import Registry
from ps_server.shard.resharding import Resharding
from ps_server.shard.rows_service import RowsService
from ps_server.shard.standby.log_feed import LogFeed, check_primary, started
from ps_server.shard.step.model import ShardModel
from ps_server.shard.step.stream import StepStream, send_published
from ps_server.shard.step.values import LoadReader, check_slices
from ps_server.shard.transport.base import AT_ONCE_BYTES
from ps_server.shard.transport.grpc_stream import (
    Context,
    GrpcServerTransport,
    read_first,
    read_soon,
    reader_gone,
    write,
)
from ps_server.shard.transport.side_channels import SideChannels
from ps_server.shard.weights import HeldWeights
from ps_server.tasks import until

SERVICE = pb.DESCRIPTOR.services_by_name["Shard"].full_name

_Handler = Callable[[Any, Context], Awaitable[Any]]


class ShardService:
    """Called by gRPC on the shard's event loop. Every PsError leaves as a status with its code in the trailers."""

    def __init__(
        self,
        shard: int,
        registry: Registry,
        counters: Counters,
        side_channels: SideChannels,
        feed: LogFeed | None = None,
        fence: Fence | None = None,
        folder: DataFolder | None = None,
        *,
        sync: bool = False,
    ) -> None:
        """``feed`` serves the log to a standby, if there is one; ``fence``: who may change this shard; None: nobody.
        ``folder``: where published weights are kept; None: in memory. ``sync``: they survive a loss of power there.
        """
        self._shard = shard
        self._fence = fence or Fence(shard, registry)
        self._feed = feed
        self._quiescence = Quiescence(shard, registry)
        self._resharding = Resharding(registry, self._quiescence)
        self._registry = registry
        self._rows = RowsService(registry, self._fence)
        self._changes = ChangeFeed(registry)
        self._directory = folder.identity.directory if folder else ""
        #: What is published of the models here.
        kept = folder.path / "weights" if folder else None
        self.weights = HeldWeights(registry, self._changes.positions, kept, side_channels, sync=sync)
        self._counters = counters
        self._side_channels = side_channels
        self._open_checks = OpenChecks(shard, registry.context.promises)

    @property
    def feed_lags(self) -> list[tuple[str, str, int]]:
        """See ChangeFeed.lags."""
        return self._changes.lags

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service to ``server``. Streams with tensors carry raw bytes, which frames.py reads and writes."""
        streams: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Step": grpc.stream_stream_rpc_method_handler(self._guarded("Step", self.step)),
            "Load": grpc.stream_unary_rpc_method_handler(self._guarded("Load", self.load)),
            "LoadRows": grpc.stream_unary_rpc_method_handler(self._guarded("LoadRows", self.load_rows)),
            "Follow": grpc.stream_stream_rpc_method_handler(self._guarded("Follow", self.follow)),
        }
        read: Mapping[str, tuple[_Handler, type[Message]]] = {
            "Pull": (self.pull, pb.PullRequest),
            "Save": (self.save, pb.SaveRequest),
            "GetRows": (self._rows.get_rows, pb.GetRowsRequest),
            "SaveBuckets": (self._rows.save_buckets, pb.SaveBucketsRequest),
            "Feed": (self._changes.serve, pb.FeedRequest),
            "GetPiece": (self.weights.serve, pb.GetPieceRequest),
            "Capture": (self.capture, pb.CaptureRequest),
        }
        asked: Mapping[str, tuple[_Handler, type[Message]]] = {
            "GetModel": (self.get_model, pb.GetModelRequest),
            "Pause": (self.pause, pb.PauseRequest),
            "CatchUp": (self.catch_up, pb.CatchUpRequest),
            "MakeRoom": (self.make_room, pb.MakeRoomRequest),
            "StageReshard": (self.stage_reshard, pb.StageReshardRequest),
            "Resume": (self.resume, pb.ResumeRequest),
            "Restore": (self.restore, pb.RestoreRequest),
            "TakePiece": (self.take_piece, pb.TakePieceRequest),
            "FinishPiece": (self.finish_piece, pb.FinishPieceRequest),
            "KeepPieces": (self.keep_pieces, pb.KeepPiecesRequest),
            "GetRoundNorm": (self.get_round_norm, pb.RoundNormRequest),
        }
        for name, (handler, kind) in read.items():
            streams[name] = grpc.unary_stream_rpc_method_handler(self._guarded(name, handler), kind.FromString)
        to_bytes = methodcaller("SerializeToString")
        for name, (handler, kind) in asked.items():
            guarded = self._guarded(name, handler)
            streams[name] = grpc.unary_unary_rpc_method_handler(guarded, kind.FromString, to_bytes)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, streams),))

    def _guarded(self, name: str, handler: _Handler) -> _Handler:
        """``handler`` behind the fence of its method."""
        from_coordinator = METHODS[f"/{SERVICE}/{name}"].fencing is Fencing.COORDINATOR

        async def guarded(request: Any, context: Context) -> Any:
            async with translated(context):
                if from_coordinator:
                    self._fence.check_coordinator(dict(context.invocation_metadata() or ()))
                return await handler(request, context)

        return guarded

    async def step(self, _: AsyncIterator[bytes], context: Context) -> None:
        """Open, then one exchange per step, on whichever channel the worker chooses."""
        request = await self._open_request(context)
        model, worker, opened = await self._open(request)
        anchor = GrpcServerTransport(context)
        offered = self._side_channels.offer(request.transports, model.layout, partial(model.lent.take, worker))
        with closing(anchor), model.streams.place(worker) as ended, offered as offer:
            await anchor.send(replace(opened, side_channels=offer.channels))
            try:
                transport = await until(ended, offer.chosen(anchor))
            except ConnectionError:
                return
            stream = StepStream(
                transport,
                model,
                worker,
                self._counters,
                request.wire,
                keeps_slices=request.keeps_slices,
                budgets=self._registry.context.budgets,
                tracer=self._registry.context.tracer,
                trusted=self._registry.context.trusts_workers,
            )
            # Over shared memory a worker's gradients are in a segment of its own. What is dealt with at once is copied
            # for the log together.
            one_by_one = model.layout.region_bytes > AT_ONCE_BYTES
            spare = model.pool.reserved(sharing=transport.kind is Transport.SHM and one_by_one)
            with model.streams.open(worker, transport.kind), spare:
                await until(ended, stream.run(None if transport is anchor else partial(_ended, anchor)))

    async def _open_request(self, context: Context) -> OpenRequest:
        """The first message of a stream. Raises InvalidRequest, ProtocolVersionMismatch."""
        message = request_from_bytes(await read_first(context, *self._registry.context.first_message) or b"")
        if not isinstance(message, OpenRequest):
            raise InvalidRequest("a stream begins with Open", actual=type(message).__name__)
        if message.protocol_version != PROTOCOL_VERSION:
            raise ProtocolVersionMismatch(
                "worker and shard speak different versions of the protocol",
                shard=str(self._shard),
                expected=str(PROTOCOL_VERSION),
                actual=str(message.protocol_version),
                remedy="install the same torch-ps on both sides",
            )
        return message

    async def _open(self, request: OpenRequest) -> tuple[ShardModel, WorkerKey, OpenedStream]:
        """Find the model and the worker's place in it."""
        check_member(Role.WORKER, *request.worker)
        await self._registry.membership(request.membership_revision)
        model = await self._registry.model(request.model, request.epoch)
        worker = WorkerKey(*request.worker)
        position = model.attach(worker, request.phase, request.clock)
        known = model.tracker.last_sequence(worker)
        self._open_checks.acknowledged(model.name, worker, request.acknowledged, known)
        self._open_checks.torch_version(worker, request.torch_version)
        model.answered(worker, request.answered)
        version = model.tracker.version
        opened = OpenedStream(version, position.phase, position.clock, known, model.values.told, torch.__version__)
        return model, worker, opened

    async def pull(self, request: pb.PullRequest, context: Context) -> None:
        """Parameters and buffers of the newest version, in every mode."""
        model = await self._registry.model(request.model, request.epoch)
        model.values.require()
        region_bytes = model.layout.region_bytes
        async with self._registry.context.answers.taken(READERS, region_bytes), model.published() as published:
            answer = StepAnswer(version=published.version, with_buffers=True)
            with reader_gone():
                await send_published(GrpcServerTransport(context), answer, published, model, self._counters)

    async def load(self, _: AsyncIterator[bytes], context: Context) -> bytes:
        """Write parameters, buffers and optimizer state."""
        message = parsed(pb.LoadRequest, await read_first(context, *self._registry.context.first_message) or b"")
        if message.WhichOneof("body") != "header":
            raise InvalidRequest("a Load begins with its header", actual=str(message.WhichOneof("body")))
        header = message.header
        worker = await self._fence.admit(worker_from_pb(header.worker), header.membership_revision)
        model = await self._registry.model(header.model, header.epoch)
        with model.uploads.place(worker, worker.incarnation) as ended:
            return await until(ended, self._load(header, worker, model, context))

    async def _load(self, header: pb.LoadHeader, worker: WorkerKey, model: ShardModel, context: Context) -> bytes:
        if header.slices:
            model.values.require()
        region = model.pool.take() if header.with_region else None
        try:
            state = STATE_HEADER.all_from_pb(header.state) if header.with_state else None
            reader = LoadReader(model.layout, state, header.slices, header.checksums, region)
            async with self._registry.context.uploads.taken(worker, reader.payload.expected_bytes):
                await reader.payload.receive_async(lambda: read_soon(context))
            written = await model.values.load(
                region,
                reader.entries,
                only_first=header.only_if_uninitialised,
                slices=frozenset(header.slices),
                checksums=dict(zip(header.slices, header.checksums, strict=False)),
                check=lambda: self._fence.check(worker),
            )
        finally:
            if region:
                model.pool.give(region)
        return pb.LoadReply(version=model.tracker.version, written=written).SerializeToString()

    async def save(self, request: pb.SaveRequest, context: Context) -> None:
        """Read parameters, buffers and optimizer state of one version, whole or of some slices."""
        model = await self._registry.model(request.model, request.epoch)
        model.values.require()
        layout, slices = model.layout, request.slices
        check_slices(layout, slices)
        ranges = [(layout.slices[i].begin, layout.slices[i].end) for i in slices] if slices else layout.ranges()
        # The values as they are published, and a copy of the optimizer's state, which most often is twice as large.
        size = 3 * sum(end - begin for begin, end in ranges)
        async with (
            self._registry.context.answers.taken(READERS, size),
            model.save(frozenset(slices) or None) as (published, entries),
        ):
            pieces = published.region.pieces(ranges)
            pieces += [tensor_bytes(tensor) for _, tensor in entries]
            header = pb.SaveHeader(
                version=published.version,
                state=STATE_HEADER.all_to_pb(describe(entries)),
                payload_bytes=sum(map(len, pieces)),
            )
            if slices:
                header.pushes.CopyFrom(pushes_to_pb(model.known_pushes()))
            await write(context, pb.SaveReply(header=header).SerializeToString())
            for chunk in SAVE_REPLIES.chunks(pieces):
                await write(context, chunk)

    async def load_rows(self, _: AsyncIterator[bytes], context: Context) -> bytes:
        """Write rows of a table."""
        return (await self._rows.load_rows(context)).SerializeToString()

    async def get_model(self, request: pb.GetModelRequest, context: Context) -> pb.ModelStatus:
        """Where the model stands on this shard."""
        model = await self._registry.model(request.model, request.epoch)
        return MODEL_STATUS.to_pb(
            model.status(),
            shard_map=convert_model.SHARD_MAP.to_pb(model.layout.shard_map),
            consistency=convert_model.CONSISTENCY.to_pb(model.tracker.consistency),
        )

    async def follow(self, _: AsyncIterator[bytes], context: Context) -> None:
        """The log, for the standby of this shard."""
        if self._feed is None:
            check_primary(await started(context), self._shard, self._registry.incarnation)
            raise InvalidRequest(
                f"shard {self._shard} keeps no log that could be followed",
                shard=str(self._shard),
                remedy="give ps-server a --data-dir, and --durability durable",
            )
        await self._feed.serve(context)

    async def pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseReply:
        """Pause: decide about no push for a while."""
        await self._resharding.settled()
        return pb.PauseReply(models=POSITION.all_to_pb(self._quiescence.pause(request.quiesce, request.seconds)))

    async def capture(self, request: pb.CaptureRequest, context: Context) -> None:
        """Capture the models of this quiesce; train on, and write the copies."""

        async def resumed(models: Sequence[ModelPosition]) -> None:
            await write(context, pb.CaptureReply(models=POSITION.all_to_pb(models)).SerializeToString())

        targets, folder = POSITION.all_from_pb(request.models), await self._folder(request.folder)
        parts = await self._quiescence.capture(request.quiesce, targets, folder, max(1, request.full_every), resumed)
        reply = pb.CaptureReply(parts=[part_to_pb(part, state) for part, state in parts])
        await write(context, reply.SerializeToString())

    async def take_piece(self, request: pb.TakePieceRequest, context: Context) -> pb.TakePieceReply:
        """Take a piece of a version at this quiesce; training goes on."""
        if len(request.models) != 1:
            raise InvalidRequest("a version is of one model", actual=f"{len(request.models)} models")

        async def hold(model: ShardModel) -> None:
            await self.weights.take(model, request.name, request.number, request.kept)

        reached = await self._quiescence.take(request.quiesce, POSITION.all_from_pb(request.models), hold)
        return pb.TakePieceReply(models=POSITION.all_to_pb(reached))

    async def finish_piece(self, request: pb.FinishPieceRequest, context: Context) -> pb.FinishPieceReply:
        """The piece that was taken, once it is written."""
        piece = await self.weights.finish(request.name, request.number)
        form = piece.native
        return pb.FinishPieceReply(
            checksum=form.checksum, size_bytes=len(form.data), directory=self._directory if piece.path else ""
        )

    async def keep_pieces(self, request: pb.KeepPiecesRequest, context: Context) -> pb.KeepPiecesReply:
        """Remove the pieces of older versions: nothing of their model is here any more."""
        self.weights.keep(request.name, request.kept, request.newest)
        return pb.KeepPiecesReply()

    async def catch_up(self, request: pb.CatchUpRequest, context: Context) -> pb.CatchUpReply:
        """Catch up with the furthest shard, and stay paused there."""
        targets = POSITION.all_from_pb(request.models)
        reached = await self._quiescence.catch_up(request.quiesce, targets, request.seconds)
        return pb.CatchUpReply(models=POSITION.all_to_pb(reached))

    async def make_room(self, request: pb.MakeRoomRequest, context: Context) -> pb.MakeRoomReply:
        """Have memory and log room for the next shard maps, before the models are paused."""
        await self._resharding.make_room([convert_model.SHARD_MAP.from_pb(message) for message in request.models])
        return pb.MakeRoomReply()

    async def stage_reshard(self, request: pb.StageReshardRequest, context: Context) -> pb.StageReshardReply:
        """Fetch what the next shard maps need, and wait for the cluster's decision."""
        maps = [convert_model.SHARD_MAP.from_pb(message) for message in request.models]
        received = await self._resharding.stage(request.quiesce, request.membership_revision, maps)
        return pb.StageReshardReply(received_bytes=received)

    async def resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeReply:
        """Resume after a quiesce, once this shard has the view that it is to go on with."""
        await self._registry.membership(request.membership_revision)
        self._resharding.abort(request.quiesce)
        self._quiescence.resume(request.quiesce)
        return pb.ResumeReply()

    async def get_round_norm(self, request: pb.RoundNormRequest, context: Context) -> pb.RoundNormReply:
        """What this shard adds to the norm of a gradient that is clipped over all shards, for another shard."""
        model = await self._registry.model(request.model, request.epoch)
        if model.clipped is None:
            raise InvalidRequest(
                f"gradients of model '{model.name}' are not clipped over several shards",
                shard=str(self._shard),
                expected="a model with clip_grad_norm that several shards hold",
            )
        return pb.RoundNormReply(squared_norm=await model.clipped.part(position_from_pb(request.position)))

    async def restore(self, request: pb.RestoreRequest, context: Context) -> pb.RestoreReply:
        """Replace values and state by those of a checkpoint."""
        folder = await self._folder(request.folder)
        return pb.RestoreReply(models=await self._quiescence.restore(folder, request.quiesce))

    async def _folder(self, text: str) -> Path:
        """Where a checkpoint is or will be. Raises InvalidRequest for a place that this shard does not use."""
        return await asyncio.to_thread(self._registry.context.checkpoints.confine, text)


async def _ended(anchor: GrpcServerTransport) -> None:
    """Returns when the worker ends its gRPC stream: then its side channel ends too."""
    if (message := await anchor.receive()) is not None:
        raise InvalidRequest(
            "a message came on the gRPC stream of a worker that attached to a side channel",
            actual=type(message).__name__,
        )
