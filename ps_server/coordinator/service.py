"""The Coordinator service: generated messages in, driver calls, generated messages out. Decides nothing."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from ps_protocol import times as shared
from ps_protocol.cluster.exchange import ExchangeKey
from ps_protocol.cluster.view import ClusterView, Member, Role, StandbyReport
from ps_protocol.cluster.weights import WeightsPin
from ps_protocol.errors import InvalidRequest
from ps_protocol.text import printable
from ps_protocol.v1 import common_pb2, coordinator_pb2_grpc
from ps_protocol.v1 import coordinator_pb2 as pb
from ps_protocol.wire.convert import cluster as convert
from ps_protocol.wire.convert.cluster import LEASE_ANSWER, LEASE_ASK, SCALE_ASK, SCALE_ORDER, history_to_pb
from ps_protocol.wire.convert.exchange import exchange_state_to_pb
from ps_protocol.wire.convert.model import CONSISTENCY
from ps_protocol.wire.convert.weights import FOLLOW_ANSWER, FOLLOW_ASK, PUBLISH_ASK, STATE
from ps_server.cli.options.checkpoint import CheckpointConfig
from ps_server.coordinator import times
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.elasticity.engines.kept_request import KeptRequest
from ps_server.coordinator.elasticity.scaling import JobScaling
from ps_server.coordinator.history.recorder import JobRecorder
from ps_server.coordinator.jobs.checkpoints import Checkpoints
from ps_server.coordinator.jobs.declaring import DeclarationThread
from ps_server.coordinator.jobs.mode_runner import ModeRunner
from ps_server.coordinator.jobs.move_runner import MoveRunner
from ps_server.coordinator.jobs.publish_runner import PublishRunner
from ps_server.coordinator.jobs.release_runner import ReleaseRunner
from ps_server.coordinator.membership.sessions import SessionIssuer
from ps_server.coordinator.placement.job_limits import NAME_REMEDY, check_length
from ps_server.coordinator.placement.move_plan import MoveRequest
from ps_server.coordinator.views import ViewEncoder
from ps_server.limits import LimitCounts
from ps_server.serving.authorization import check_member, current_caller
from ps_server.serving.rpc_errors import translated

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Coordinator"].full_name

MAX_REQUEST_BYTES = 4 << 20
"""Limit of a request; about 70,000 variables can be declared in it."""


_MAX_REASON = 1000
"""Limit of the reason for which a member left, in characters."""


Context = grpc.aio.ServicerContext[Any, Any]


class CoordinatorService(coordinator_pb2_grpc.CoordinatorServicer):
    """Called by the gRPC server on the driver's loop. Errors leave through rpc_errors."""

    def __init__(
        self,
        driver: Driver,
        checkpoints: Checkpoints | None = None,
        moves: MoveRunner | None = None,
        recorder: JobRecorder | None = None,
        sessions: SessionIssuer | None = None,
        limit_counts: LimitCounts | None = None,
        kept_request: KeptRequest | None = None,
        scaling: JobScaling | None = None,
        publishing: PublishRunner | None = None,
    ) -> None:
        """``sessions`` gives members their session tokens; None: nobody is authenticated. ``limit_counts``: of the
        server. ``kept_request``: the engine, if the program that starts workers polls for requests.
        """
        self._limit_counts = limit_counts or LimitCounts()
        self._driver = driver
        self._recorder = recorder or JobRecorder(driver)
        self._sessions = sessions or SessionIssuer()
        self._checkpoints = checkpoints or Checkpoints(driver, CheckpointConfig())
        self._moves = moves or MoveRunner(driver, self._checkpoints.busy)
        self._releases = ReleaseRunner(driver, self._checkpoints.busy)
        self._modes = ModeRunner(driver, self._checkpoints.busy)
        self._publishing = publishing or PublishRunner(driver, self._checkpoints.busy)
        self._declaring = DeclarationThread(driver)
        self._views = ViewEncoder()
        self._kept_request = kept_request or KeptRequest()
        self._scaling = scaling or JobScaling(driver, self._moves, kept_request, time.monotonic)

    def register(self, server: grpc.aio.Server) -> None:
        """Add this service to a server that is not started yet."""
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        # Replaces the generated handler: the replies of this one are already encoded.
        watch: Any = grpc.unary_stream_rpc_method_handler(self.Watch, request_deserializer=pb.WatchRequest.FromString)
        server.add_registered_method_handlers(SERVICE_NAME, {"Watch": watch})

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinReply:  # noqa: N802
        """A new member, or the same answer to the same token."""
        async with translated(context):
            ask = convert.JOIN.from_pb(request)
            self._sessions.check_joining(current_caller(), ask.role, ask.index)
            joined = await self._driver.join_when_vacant(ask, wait_seconds(shared.PATIENCE_SECONDS, context))
            named, member = replace(joined, job=self._driver.settings.job), joined.member
            reply = convert.JOINED.to_pb(named, index=member.index, incarnation=member.incarnation)
            reply.session = self._sessions.issue(current_caller(), joined.member)
            reply.session_key = self._sessions.public_key
            return reply

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatReply:  # noqa: N802
        """A lease renewed."""
        async with translated(context):
            role = convert.role_from_pb(request.role)
            check_member(role, request.index, request.incarnation)
            self._driver.check_journal(request.journal_mark)
            self._driver.check_member(role, request.index, request.incarnation)
            stats = convert.STATS.from_pb(request.stats)
            sync = StandbyReport(request.sync.number, request.sync.directory) if request.HasField("sync") else None
            revision = self._driver.heartbeat(
                role,
                request.index,
                request.incarnation,
                stats,
                keeps_state=request.keeps_state,
                sync=sync,
                journal_mark=request.journal_mark,
            )
            member = Member(role, request.index, request.incarnation)
            session = self._sessions.issue(current_caller(), member)
            return pb.HeartbeatReply(
                revision=revision,
                journal_mark=self._driver.journal_mark,
                session=session,
                next_seconds=self._driver.heartbeat_seconds,
            )

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveReply:  # noqa: N802
        """A membership ended."""
        async with translated(context):
            role = convert.role_from_pb(request.role)
            check_member(role, request.index, request.incarnation)
            self._driver.leave(role, request.index, request.incarnation, printable(request.reason[:_MAX_REASON]))
            return pb.LeaveReply()

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[bytes]:  # noqa: N802
        """Encoded views until the caller ends the call or the coordinator stops."""
        async with translated(context):
            if request.role != pb.ROLE_UNSPECIFIED:
                role = convert.role_from_pb(request.role)
                check_member(role, request.index, request.incarnation)

                def ended(_: object) -> None:
                    self._driver.stream_ended(role, request.index, request.incarnation)

                self._driver.stream_opened(role, request.index, request.incarnation)
                context.add_done_callback(ended)  # type: ignore[arg-type]
            before: ClusterView | None = None
            async for view in self._driver.views(request.known_revision, request.journal_mark):
                yield self._encode(view, before)
                before = view if request.takes_changes else None

    async def DeclareModel(  # noqa: N802
        self, request: pb.DeclareModelRequest, context: Context
    ) -> common_pb2.ShardMap:
        """The shard map of a model, placed now or before."""
        async with translated(context):
            check_member(Role.WORKER, request.rank, request.incarnation)
            with self._limit_counts.counting():
                return await self._declaring.declare(request.rank, request.incarnation, request.spec)

    async def GetShardMap(  # noqa: N802
        self, request: pb.GetShardMapRequest, context: Context
    ) -> common_pb2.ShardMap:
        """The shard map of a model that was declared."""
        async with translated(context):
            return await self._declaring.shard_map(request.model)

    async def CloseModel(  # noqa: N802
        self, request: pb.CloseModelRequest, context: Context
    ) -> pb.CloseModelReply:
        """The end of a worker's use of a model, and of the model, after waiting for other workers."""
        async with translated(context):
            check_member(Role.WORKER, request.rank, request.incarnation)
            wait = wait_seconds(request.wait_seconds, context)
            ask = convert.CLOSED_MODEL.from_pb(request)
            await self._releases.close(request.rank, request.incarnation, ask, wait)
            return pb.CloseModelReply()

    async def ReleaseModel(  # noqa: N802
        self, request: pb.ReleaseModelRequest, context: Context
    ) -> pb.ReleaseModelReply:
        """A model dropped."""
        async with translated(context):
            return pb.ReleaseModelReply(size_bytes=await self._releases.release(request.model))

    async def SetConsistency(  # noqa: N802
        self, request: pb.SetConsistencyRequest, context: Context
    ) -> pb.ClusterView:
        """The view with the new mode, which begins at one point of all shards."""
        async with translated(context):
            wait = wait_seconds(shared.PATIENCE_SECONDS, context)
            return convert.VIEW.to_pb(await self._modes.change(CONSISTENCY.from_pb(request.consistency), wait))

    async def AcknowledgeDivergence(  # noqa: N802
        self, request: pb.AcknowledgeDivergenceRequest, context: Context
    ) -> pb.AcknowledgeDivergenceReply:
        """What had grown far above its history, and is usual from now on."""
        async with translated(context):
            found = self._driver.acknowledge_divergence()
            return pb.AcknowledgeDivergenceReply(divergences=map(convert.DIVERGENCE.to_pb, found))

    async def Barrier(self, request: pb.BarrierRequest, context: Context) -> pb.BarrierReply:  # noqa: N802
        """Whether the barrier has opened, after waiting for it."""
        async with translated(context):
            check_member(Role.WORKER, request.rank, request.incarnation)
            wait = wait_seconds(request.wait_seconds, context)
            state = await self._driver.barrier(request.rank, request.incarnation, request.phase, wait)
            return convert.BARRIER.to_pb(state)

    async def Exchange(self, request: pb.ExchangeRequest, context: Context) -> pb.ExchangeReply:  # noqa: N802
        """The payloads of an exchange, after waiting for them."""
        async with translated(context):
            check_member(Role.WORKER, request.rank, request.incarnation)
            key, wait = ExchangeKey(request.name, request.ordinal), wait_seconds(request.wait_seconds, context)
            state = await self._driver.exchange(request.rank, request.incarnation, key, request.payload, wait)
            return exchange_state_to_pb(state)

    async def LeaseData(self, request: pb.LeaseDataRequest, context: Context) -> pb.LeaseDataReply:  # noqa: N802
        """A range of a dataset, after waiting for one."""
        async with translated(context):
            check_member(Role.WORKER, request.rank, request.incarnation)
            self._driver.check_member(Role.WORKER, request.rank, request.incarnation)
            most = self._driver.settings.limits.max_name_bytes
            with self._limit_counts.counting():
                check_length("the name of a dataset", request.dataset, most, NAME_REMEDY)
            ask, wait = LEASE_ASK.from_pb(request), wait_seconds(request.wait_seconds, context)
            return LEASE_ANSWER.to_pb(await self._driver.lease_data(request.rank, request.incarnation, ask, wait))

    async def Checkpoint(  # noqa: N802
        self, request: pb.CheckpointRequest, context: Context
    ) -> pb.CheckpointReply:
        """A complete checkpoint."""
        async with translated(context):
            made = await self._checkpoints.make()
            return pb.CheckpointReply(folder=str(made.folder), size_bytes=made.size_bytes, seconds=made.seconds)

    async def RestoreCheckpoint(  # noqa: N802
        self, request: pb.RestoreCheckpointRequest, context: Context
    ) -> pb.RestoreCheckpointReply:
        """A checkpoint, restored into the running job."""
        async with translated(context):
            step = request.step if request.HasField("step") else None
            if request.folder and step is not None:
                raise InvalidRequest(
                    "a checkpoint is named by its folder or by its step",
                    actual=f"both {request.folder[:500]} and step {step}",
                    remedy="leave one of them out",
                )
            folder, models = await self._checkpoints.restore(Path(request.folder) if request.folder else None, step)
            return pb.RestoreCheckpointReply(folder=str(folder), models=models)

    async def Reshard(  # noqa: N802
        self, request: pb.ReshardRequest, context: Context
    ) -> AsyncIterator[pb.ReshardProgress]:
        """The progress of a move, batch by batch, until it is done or the caller ends the call."""
        async with translated(context):
            wish = MoveRequest(tuple(request.to), tuple(request.drain), request.model, request.variable)
            self._scaling.moved_by_hand(wish)
            async with aclosing(self._moves.reshard(wish, request.batch_bytes)) as made:
                async for progress in made:
                    yield convert.MOVE_PROGRESS.to_pb(progress)

    async def Scale(  # noqa: N802
        self, request: pb.ScaleRequest, context: Context
    ) -> AsyncIterator[pb.ScaleProgress]:
        """A stream of what the job waits for until it has the wanted workers and shards."""
        async with translated(context), aclosing(self._scaling.scale(SCALE_ASK.from_pb(request))) as steps:
            async for step in steps:
                yield pb.ScaleProgress(text=step.text, done=step.done)

    async def Publish(  # noqa: N802
        self, request: pb.PublishRequest, context: Context
    ) -> AsyncIterator[pb.PublishReply]:
        """A version of the weights of a model: when the shards have taken it, and when it is committed."""
        async with translated(context):
            check_member(Role.WORKER, request.rank, request.incarnation)
            ask = PUBLISH_ASK.from_pb(request)
            async with aclosing(self._publishing.publish(request.rank, request.incarnation, ask)) as steps:
                async for number, committed in steps:
                    yield pb.PublishReply(number=number, committed=committed)

    async def FollowWeights(  # noqa: N802
        self, request: pb.FollowWeightsRequest, context: Context
    ) -> pb.FollowWeightsReply:
        """The newest version of a name, after waiting for one that is newer than the reader's."""
        async with translated(context):
            wait = wait_seconds(request.wait_seconds, context)
            return FOLLOW_ANSWER.to_pb(await self._driver.follow_weights(FOLLOW_ASK.from_pb(request), wait))

    async def PinWeights(  # noqa: N802
        self, request: pb.PinWeightsRequest, context: Context
    ) -> pb.PinWeightsReply:
        """A version kept for some time."""
        async with translated(context):
            pin = WeightsPin(request.number, printable(request.holder[:_MAX_REASON]), 0.0)
            self._driver.pin_weights(request.name, pin, request.seconds)
            return pb.PinWeightsReply()

    async def GetWeights(self, request: pb.GetWeightsRequest, context: Context) -> pb.GetWeightsReply:  # noqa: N802
        """What is published, and who reads it."""
        async with translated(context):
            return pb.GetWeightsReply(names=STATE.all_to_pb(self._driver.weights()))

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.ClusterStatus:  # noqa: N802
        """Members with their last statistics."""
        async with translated(context):
            return convert.STATUS.to_pb(self._driver.status())

    async def GetHistory(self, request: pb.GetHistoryRequest, context: Context) -> pb.JobHistory:  # noqa: N802
        """The status and the kept history of the job."""
        async with translated(context):
            history = self._recorder.history()
            if request.last_points:
                history = replace(history, curves=history.curves.last(request.last_points))
            return history_to_pb(history)

    async def GetWorkerRequest(  # noqa: N802
        self, request: pb.GetWorkerRequestRequest, context: Context
    ) -> pb.WorkerRequest:
        """The processes that the program which starts them should run."""
        async with translated(context):
            last, members = self._kept_request.last, self._driver.view
            lost = [
                pb.LostServer(
                    role=convert.role_to_pb(each.member.role),
                    index=each.member.index,
                    host=each.host,
                    pid=each.pid,
                    how=each.gone,
                    replaced=each.member.index in members.live(each.member.role),
                )
                for each in self._driver.lost_servers
            ]
            self._kept_request.asked_at = time.monotonic()
            order = SCALE_ORDER.to_pb(self._scaling.order)
            return pb.WorkerRequest(number=last.number, workers=last.workers, ranks=last.ranks, lost=lost, scale=order)

    def _encode(self, view: ClusterView, before: ClusterView | None) -> bytes:
        return self._views.encode(view, before)


def wait_seconds(wished: float, context: Context) -> float:
    """How long a call may wait. Raises InvalidRequest for an invalid time; the driver limits a long one."""
    if not wished >= 0.0:
        raise InvalidRequest(
            "wait_seconds is not a valid time", expected="0 or more seconds", actual=str(wished), remedy="send 0"
        )
    left = context.time_remaining()
    return wished if left is None else min(wished, left - times.ANSWER_SECONDS)
