"""Calls to the coordinator over dataclasses: deadlines, repetition after a broken connection, typed errors."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Self

import grpc

from ps_protocol import times
from ps_protocol.client.connection import CoordinatorConnection
from ps_protocol.client.coordinator_streams import MoveStream, ScaleStream, ViewStream
from ps_protocol.cluster.exchange import ExchangeKey, ExchangeState
from ps_protocol.cluster.history import JobHistory
from ps_protocol.cluster.leases import LeaseAnswer, LeaseAsk
from ps_protocol.cluster.scaling import ScaleAsk, ScaleOrder
from ps_protocol.cluster.view import (
    BarrierState,
    ClosedModelAsk,
    ClusterStatus,
    ClusterView,
    Divergence,
    HeartbeatAnswer,
    Joined,
    JoinRequest,
    Member,
    MemberStats,
    StandbyReport,
)
from ps_protocol.cluster.weights import FollowAnswer, FollowAsk, PublishAsk, WeightsState
from ps_protocol.model.spec import Consistency, ModelSpec, ShardMap
from ps_protocol.rpc.channel import open_channel
from ps_protocol.rpc.client_errors import translate
from ps_protocol.security.credentials import SESSION, SessionCredential
from ps_protocol.security.security import OFF, Security
from ps_protocol.v1 import coordinator_pb2 as pb
from ps_protocol.wire.convert import cluster as convert
from ps_protocol.wire.convert.cluster import LEASE_ANSWER, LEASE_ASK, SCALE_ASK, SCALE_ORDER, history_from_pb
from ps_protocol.wire.convert.exchange import exchange_state_from_pb, exchange_to_pb
from ps_protocol.wire.convert.fields import message_of
from ps_protocol.wire.convert.model import CONSISTENCY, SHARD_MAP, SPEC
from ps_protocol.wire.convert.weights import FOLLOW_ANSWER, FOLLOW_ASK, PUBLISH_ASK, STATE


class MemberSessions:
    """Owned by one CoordinatorClient, which joins and renews. Any thread may ask."""

    def __init__(self) -> None:
        self._credentials: dict[int, SessionCredential] = {}
        #: Verifies the sessions of this job; empty where nobody is authenticated.
        self.public_key = b""

    def of(self, member: Member) -> SessionCredential:
        """The credential of ``member``, renewed in place; empty before it joined."""
        return self._credentials.setdefault(member.incarnation, SessionCredential())

    def forget(self, member: Member) -> None:
        """The membership has ended."""
        self._credentials.pop(member.incarnation, None)

    def metadata(self, member: Member) -> tuple[tuple[str, bytes], ...]:
        """Of a call by ``member`` to the coordinator."""
        credential = self._credentials.get(member.incarnation)
        return ((SESSION, credential.token),) if credential and credential.token else ()


LINEAGE_VARIABLE = "PS_LINEAGE"
"""Set by a supervisor to the same text for all processes that it starts for one place, one after the other. Such a
process does not wait for the lease of the one before it.
"""

EXIT_UNSAVED = 74
"""Exit code of a coordinator whose last checkpoint was not written; of ps-run too."""


class CoordinatorClient:
    """The coordinator's calls, blocking. Any thread may use it; each call but watch, move and scale has a deadline.

    Every call is safe to repeat (the .proto says so), so all but heartbeat, leave, watch, move, scale and those about
    checkpoints are repeated with growing pauses until ``timeout_seconds`` have passed, then raise Unavailable. Errors
    are ps_protocol.errors.
    """

    def __init__(self, address: str, security: Security = OFF) -> None:
        self.address = address
        self.security = security
        self._connection = CoordinatorConnection(address, security)
        self.sessions = MemberSessions()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls in progress fail with Unavailable."""
        self._connection.close()

    @property
    def repeated(self) -> int:
        """How many calls broke off and were made again."""
        return self._connection.repeated

    def open_shard(self, address: str, member: Member | None = None) -> grpc.Channel:
        """A channel to the shard at ``address``, for calls by ``member``, or by nobody who joined."""
        session = self.sessions.of(member) if member else None
        return open_channel(address, self.security, session, to_shard=True)

    def wait_until_reachable(self, timeout_seconds: float, on_wait: Callable[[str], None] = lambda text: None) -> None:
        """See CoordinatorConnection."""
        self._connection.wait_until_reachable(timeout_seconds, on_wait)

    def connect(self, timeout_seconds: float = times.CONNECT_SECONDS) -> None:
        """See CoordinatorConnection."""
        self._connection.connect(timeout_seconds)

    def join(self, request: JoinRequest, token: str, timeout_seconds: float = times.CALL_SECONDS) -> Joined:
        """Become a member. ``token`` is random and the same for each repetition by one process.

        Raises ProtocolVersionMismatch, UnknownShard, InvalidRequest, Fenced for a shard for which newer state than
        ``request.data_incarnation`` exists, NotReady for a place that is not available now, or PlaceTaken for one that
        another process holds. Waits up to the end of its lease while that process is silent.
        """
        lineage = os.environ.get(LINEAGE_VARIABLE, "")
        request = replace(request, token=token, host=socket.gethostname(), pid=os.getpid(), lineage=lineage)
        reply = self._connection.call("Join", convert.JOIN.to_pb(request), timeout_seconds)
        member = Member(request.role, reply.index, reply.incarnation, request.address)
        joined = convert.JOINED.from_pb(reply, member=member)
        if reply.session:
            self.sessions.public_key = reply.session_key
            self.sessions.of(joined.member).renew(reply.session)
        return joined

    def heartbeat(
        self,
        member: Member,
        stats: MemberStats,
        timeout_seconds: float = times.CALL_SECONDS,
        *,
        keeps_state: bool = False,
        sync: StandbyReport | None = None,
        journal_mark: bytes = b"",
    ) -> HeartbeatAnswer:
        """Renew the lease of ``member``, once.

        ``journal_mark``: the newest that this member knows. Raises Fenced, or DamagedData when the coordinator has
        come back with an older journal.
        """
        request = _heartbeat(member, stats, keeps_state, sync, journal_mark)
        proof = self.sessions.metadata(member)
        reply = self._connection.once("Heartbeat", request, timeout_seconds, metadata=proof)
        if reply.session:
            self.sessions.of(member).renew(reply.session)
        return HeartbeatAnswer(reply.journal_mark, reply.next_seconds)

    def announce_state(self, member: Member, stats: MemberStats, timeout_seconds: float = times.CALL_SECONDS) -> None:
        """Report that the state of shard ``member`` is on disk under its incarnation; older state is refused then.

        Raises Fenced when the place was lost before.
        """
        request = _heartbeat(member, stats, keeps_state=True)
        self._connection.call("Heartbeat", request, timeout_seconds, metadata=self.sessions.metadata(member))

    def report_standby(self, member: Member, stats: MemberStats, report: StandbyReport, timeout_seconds: float) -> None:
        """Return once the coordinator has ``report`` of shard ``member``. Raises Fenced, Unavailable."""
        request = _heartbeat(member, stats, keeps_state=True, sync=report)
        self._connection.call("Heartbeat", request, timeout_seconds, metadata=self.sessions.metadata(member))

    def leave(
        self, member: Member, reason: str = "", timeout_seconds: float = times.CALL_SECONDS, *, once: bool = True
    ) -> None:
        """End the membership of ``member``. ``reason`` is empty at a clean end. Raises Fenced, Unavailable."""
        request = pb.LeaveRequest(
            role=convert.role_to_pb(member.role), index=member.index, incarnation=member.incarnation, reason=reason
        )
        call = self._connection.once if once else self._connection.call
        call("Leave", request, timeout_seconds, metadata=self.sessions.metadata(member))
        self.sessions.forget(member)

    def watch(self, known_revision: int = 0, journal_mark: bytes = b"", member: Member | None = None) -> ViewStream:
        """The current view, unless it is ``known_revision``, then one after every change. Waits to connect.

        ``journal_mark``: as for ``heartbeat``. ``member``: the one that watches; when its stream ends, the coordinator
        takes it for lost sooner.
        """
        request = pb.WatchRequest(known_revision=known_revision, journal_mark=journal_mark, takes_changes=True)
        if member is not None:
            request.role = convert.role_to_pb(member.role)
            request.index, request.incarnation = member.index, member.incarnation
        proof = self.sessions.metadata(member) if member else ()
        return ViewStream(
            self._connection.stub.Watch(request, wait_for_ready=True, metadata=proof), self._connection.peer
        )

    def declare_model(self, worker: Member, spec: ModelSpec, timeout_seconds: float = times.CALL_SECONDS) -> ShardMap:
        """Declare a model: the first is placed, a later one must match.

        Raises ModelMismatch, NotReady while shards are missing, InvalidRequest or Fenced.
        """
        request = pb.DeclareModelRequest(rank=worker.index, incarnation=worker.incarnation, spec=SPEC.to_pb(spec))
        proof = self.sessions.metadata(worker)
        return SHARD_MAP.from_pb(self._connection.call("DeclareModel", request, timeout_seconds, metadata=proof))

    def get_shard_map(self, model: str, timeout_seconds: float = times.CALL_SECONDS) -> ShardMap:
        """The shard map of ``model``. Raises UnknownModel."""
        return SHARD_MAP.from_pb(
            self._connection.call("GetShardMap", pb.GetShardMapRequest(model=model), timeout_seconds)
        )

    def publish(self, worker: Member, ask: PublishAsk) -> Iterator[tuple[int, bool]]:
        """Publish a version: its number when the shards have taken it, and again, with True, when it is committed.

        Not repeated here; safe to repeat with the same token. Raises the errors of the coordinator, and Unavailable at
        once where it is away.
        """
        request = PUBLISH_ASK.to_pb(ask, rank=worker.index, incarnation=worker.incarnation)
        replies = self._connection.stub.Publish(
            request, timeout=times.CHECKPOINT_SECONDS, metadata=self.sessions.metadata(worker)
        )
        try:
            for reply in replies:
                yield reply.number, reply.committed
        except grpc.RpcError as error:
            raise translate(error, self._connection.peer) from error
        finally:
            replies.cancel()

    def follow_weights(
        self,
        ask: FollowAsk,
        wait_seconds: float,
        timeout_seconds: float = times.CALL_SECONDS,
        on_wait: Callable[[str], None] = lambda text: None,
        *,
        is_first: bool = False,
    ) -> FollowAnswer:
        """What a reader is told of published weights, after waiting up to ``wait_seconds`` for a newer version.

        ``timeout_seconds``: as for ``barrier``. ``on_wait`` is called with why the coordinator does not answer, which
        is found out for the first call. Raises UnknownVersion, VersionGone, InvalidRequest; for the first call also
        Unauthenticated where one side does not accept the certificate of the other, or does not speak TLS.
        """
        answer = self._connection.call(
            "FollowWeights",
            FOLLOW_ASK.to_pb(ask, wait_seconds=wait_seconds),
            wait_seconds + timeout_seconds,
            on_wait=on_wait,
            try_seconds=wait_seconds + times.HINT_SECONDS if is_first else math.inf,
        )
        return FOLLOW_ANSWER.from_pb(answer)

    def pin_weights(
        self, name: str, number: int, holder: str, seconds: float, timeout_seconds: float = times.CALL_SECONDS
    ) -> None:
        """Keep a version for ``seconds``; 0: no longer. Raises UnknownVersion, VersionGone, InvalidRequest."""
        request = message_of(pb.PinWeightsRequest, name=name, number=number, holder=holder, seconds=seconds)
        self._connection.call("PinWeights", request, timeout_seconds)

    def get_weights(self, timeout_seconds: float = times.CALL_SECONDS) -> tuple[WeightsState, ...]:
        """Everything that is published, with its versions, readers and pins."""
        return STATE.all_from_pb(self._connection.call("GetWeights", pb.GetWeightsRequest(), timeout_seconds).names)

    def close_model(
        self, worker: Member, ask: ClosedModelAsk, wait_seconds: float, timeout_seconds: float = times.CALL_SECONDS
    ) -> None:
        """``worker`` uses a model no more. For a release this waits up to ``wait_seconds`` for the others that do.

        ``timeout_seconds``: as for ``barrier``. Raises NotReady, naming them, when some still do; ask again. Fenced.
        """
        request = convert.CLOSED_MODEL.to_pb(
            ask, rank=worker.index, incarnation=worker.incarnation, wait_seconds=wait_seconds
        )
        seconds, proof = wait_seconds + timeout_seconds, self.sessions.metadata(worker)
        self._connection.call("CloseModel", request, seconds, metadata=proof)

    def release_model(self, model: str, timeout_seconds: float = times.CALL_SECONDS) -> int:
        """Drop a model; returns the bytes of its variables. Raises NotReady while used, UnknownModel, ModelReleased."""
        request = message_of(pb.ReleaseModelRequest, model=model)
        return int(self._connection.once("ReleaseModel", request, timeout_seconds, wait_for_ready=True).size_bytes)

    def set_consistency(self, consistency: Consistency, timeout_seconds: float = times.PATIENCE_SECONDS) -> ClusterView:
        """Change the mode of the job, at one point of all shards.

        Raises InvalidRequest when it does not fit the cluster, NotReady when the shards do not come to one point in
        time.
        """
        request = pb.SetConsistencyRequest(consistency=CONSISTENCY.to_pb(consistency))
        return convert.VIEW.from_pb(self._connection.call("SetConsistency", request, timeout_seconds))

    def acknowledge_divergence(self, timeout_seconds: float = times.CALL_SECONDS) -> tuple[Divergence, ...]:
        """Take what has grown far above its history for usual; returns what was reported until now."""
        reply = self._connection.call("AcknowledgeDivergence", pb.AcknowledgeDivergenceRequest(), timeout_seconds)
        return tuple(map(convert.DIVERGENCE.from_pb, reply.divergences))

    def barrier(
        self, worker: Member, phase: int, wait_seconds: float, timeout_seconds: float = times.CALL_SECONDS
    ) -> BarrierState:
        """Arrive at the barrier that ends ``phase`` and wait there up to ``wait_seconds``; ask again if not released.

        ``timeout_seconds``: time added for a coordinator that does not answer. Raises Fenced.
        """
        request = pb.BarrierRequest(
            rank=worker.index, incarnation=worker.incarnation, phase=phase, wait_seconds=wait_seconds
        )
        seconds, proof = wait_seconds + timeout_seconds, self.sessions.metadata(worker)
        return convert.BARRIER.from_pb(self._connection.call("Barrier", request, seconds, metadata=proof))

    def exchange(
        self,
        worker: Member,
        key: ExchangeKey,
        payload: bytes,
        wait_seconds: float = 0.0,
        timeout_seconds: float = times.CALL_SECONDS,
    ) -> ExchangeState:
        """Give ``payload`` for the exchange ``key`` and wait up to ``wait_seconds``; ask again if not complete.

        ``timeout_seconds``: as for ``barrier``. Raises Fenced, or InvalidRequest for what is above a limit and for a
        result that is not kept any more.
        """
        request = exchange_to_pb(worker, key, payload, wait_seconds)
        seconds, proof = wait_seconds + timeout_seconds, self.sessions.metadata(worker)
        return exchange_state_from_pb(self._connection.call("Exchange", request, seconds, metadata=proof))

    def lease_data(
        self, worker: Member, ask: LeaseAsk, wait_seconds: float = 0.0, timeout_seconds: float = times.CALL_SECONDS
    ) -> LeaseAnswer:
        """Report what was trained, then lease a range, waiting up to ``wait_seconds`` while others lease all items.

        ``timeout_seconds``: time added for a coordinator that does not answer. Raises Fenced, or InvalidRequest for
        another dataset than the one known by this name.
        """
        request = LEASE_ASK.to_pb(ask, rank=worker.index, incarnation=worker.incarnation, wait_seconds=wait_seconds)
        seconds, proof = wait_seconds + timeout_seconds, self.sessions.metadata(worker)
        return LEASE_ANSWER.from_pb(self._connection.call("LeaseData", request, seconds, metadata=proof))

    def checkpoint(self, timeout_seconds: float = times.CHECKPOINT_SECONDS) -> tuple[str, int, float]:
        """Make a checkpoint; returns its folder, its bytes, the seconds it took.

        Raises InvalidRequest when the coordinator has no directory for them, NotReady, Unavailable, StorageFull.
        """
        reply = self._connection.once("Checkpoint", pb.CheckpointRequest(), timeout_seconds, wait_for_ready=True)
        return reply.folder, reply.size_bytes, reply.seconds

    def restore_checkpoint(
        self, folder: str = "", step: int | None = None, timeout_seconds: float = times.CHECKPOINT_SECONDS
    ) -> tuple[str, list[str]]:
        """Restore ``folder``, else the checkpoint of ``step``, else the newest one, into the running job; returns the
        folder and its models.

        Raises InvalidRequest, ModelMismatch, DamagedData, NotReady, Unavailable.
        """
        request = message_of(pb.RestoreCheckpointRequest, folder=folder, step=step)
        reply = self._connection.once("RestoreCheckpoint", request, timeout_seconds, wait_for_ready=True)
        return reply.folder, list(reply.models)

    def move(
        self,
        to: Collection[int] = (),
        drain: Collection[int] = (),
        model: str = "",
        variable: str = "",
        batch_bytes: int = 0,
    ) -> MoveStream:
        """Move slices while the job trains, until the stream ends.

        ``to``: shards that have slices then. ``drain``: shards that have none. Neither: balance all shards. With
        ``model`` and ``variable`` only that one moves, to the one shard in ``to``. ``batch_bytes`` move in one pause of
        training; 0: the default. The stream raises UnknownShard, UnknownModel, InvalidRequest, NotReady,
        Unavailable, StorageFull.
        """
        request = message_of(
            pb.ReshardRequest, to=to, drain=drain, model=model, variable=variable, batch_bytes=batch_bytes
        )
        return MoveStream(self._connection.stub.Reshard(request), self._connection.peer)

    def scale(self, ask: ScaleAsk, timeout_seconds: float | None = None) -> ScaleStream:
        """Have the job have as many workers and shards as asked for; the stream tells what it waits for until it has.

        What was asked for stays wanted when the stream is left early. The stream raises InvalidRequest for a number
        that the job cannot have, NotReady where nobody starts and ends processes, when another caller scales the job,
        and after ``timeout_seconds``; Unavailable.
        """
        request = SCALE_ASK.to_pb(ask)
        return ScaleStream(lambda: self._connection.stub.Scale(request), self._connection.peer, timeout_seconds)

    def get_order(self, timeout_seconds: float = times.CALL_SECONDS) -> ScaleOrder:
        """Which workers and shards are to run. Not repeated without an answer."""
        answer = self._connection.once("GetWorkerRequest", pb.GetWorkerRequestRequest(), timeout_seconds)
        return SCALE_ORDER.from_pb(answer.scale)

    def get_status(self, timeout_seconds: float = times.CALL_SECONDS, *, once: bool = False) -> ClusterStatus:
        """The view, and every member with its last statistics. ``once``: not repeated without an answer."""
        call = self._connection.once if once else self._connection.call
        return convert.STATUS.from_pb(call("GetStatus", pb.GetStatusRequest(), timeout_seconds))

    def get_history(self, timeout_seconds: float = times.CALL_SECONDS, *, last_points: int = 0) -> JobHistory:
        """The status with curves, events, checkpoints and placement. ``last_points``: of each curve; 0: all.

        Raises Unavailable at once where no coordinator answers.
        """
        request = message_of(pb.GetHistoryRequest, last_points=last_points)
        return history_from_pb(self._connection.once("GetHistory", request, timeout_seconds))


def _heartbeat(
    member: Member, stats: MemberStats, keeps_state: bool, sync: StandbyReport | None = None, journal_mark: bytes = b""
) -> pb.HeartbeatRequest:
    return pb.HeartbeatRequest(
        role=convert.role_to_pb(member.role),
        index=member.index,
        incarnation=member.incarnation,
        stats=convert.STATS.to_pb(stats),
        keeps_state=keeps_state,
        sync=pb.SyncWord(number=sync.number, directory=sync.directory) if sync else None,
        journal_mark=journal_mark,
    )
