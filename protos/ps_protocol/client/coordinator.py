"""Calls to the coordinator over dataclasses: deadlines, repetition after a broken connection, typed errors."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc

from ps_protocol import PROTOCOL_VERSION
from ps_protocol import convert_cluster as convert
from ps_protocol.address import split_address
from ps_protocol.channel import CLIENT_OPTIONS
from ps_protocol.client.errors import translate
from ps_protocol.client.reach import why_unreachable
from ps_protocol.convert import consistency_to_pb, shard_map_from_pb, spec_to_pb
from ps_protocol.convert_leases import answer_from_pb, ask_to_pb
from ps_protocol.errors import Unavailable
from ps_protocol.leases import LeaseAnswer, LeaseAsk
from ps_protocol.model import Consistency, ModelSpec, ShardMap
from ps_protocol.v1 import coordinator_pb2 as pb
from ps_protocol.v1.coordinator_pb2_grpc import CoordinatorStub
from ps_protocol.view import (
    BarrierState,
    ClusterStatus,
    ClusterView,
    Joined,
    Member,
    MemberStats,
    MoveProgress,
    Role,
    SyncWord,
)

CONNECT_SECONDS = 5.0
"""How long a command that a person waits for tries to reach the coordinator."""

CALL_SECONDS = 10.0
"""How long a call is tried before it fails with Unavailable."""

LINEAGE_VARIABLE = "PS_LINEAGE"
"""Set by a supervisor to the same text for all processes that it starts for one place, each after the one before it has
ended: such a one does not wait for a lease.
"""

WAIT_REPORT_SECONDS = 3.0
"""How often a wait for an absent coordinator is told of."""

CHECKPOINT_SECONDS = 3600.0
"""How long a whole job may take to be written or read."""

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0


def connect_channel(address: str) -> grpc.Channel:
    """A channel to ``address`` (host:port) with this project's settings. It connects by itself, now or later."""
    return grpc.insecure_channel(address, options=CLIENT_OPTIONS)


@dataclass(frozen=True, slots=True)
class JoinSpec:
    """The place a process asks for. Without ``index`` a worker or evaluator gets the lowest free one."""

    role: Role
    index: int | None = None
    #: host:port where a shard serves; empty for the other roles.
    address: str = ""
    #: Shards: the incarnation that wrote the state this process holds last; 0 when it holds none.
    data_incarnation: int = 0
    #: Shards and standbys: name of the data directory; empty without one.
    directory: str = ""
    #: Shards: take the place only when it is vacant, and this directory holds everything acknowledged.
    yields: bool = False
    #: Shards: a number that the job does not have yet is added to it, as a spare one.
    add: bool = False
    #: Take the place from a process that may live.
    take_over: bool = False


class ViewStream:
    """Views as they arrive from one Watch call. Iterated by one thread; any thread may cancel."""

    def __init__(self, call: Any, peer: str) -> None:
        self._call = call
        self._peer = peer

    def __iter__(self) -> Iterator[ClusterView]:
        """Yields each new view. Raises Unavailable when the stream breaks or is cancelled."""
        try:
            for message in self._call:
                yield convert.view_from_pb(message)
        except grpc.RpcError as error:
            raise translate(error, self._peer) from error

    def cancel(self) -> None:
        """End the iteration from another thread."""
        self._call.cancel()


class MoveStream:
    """Progress of one Reshard call. Used by one thread, which a signal may interrupt while it waits.

    gRPC's own waiting may be left locked by a handler that raises, as that of Ctrl-C does; so another thread reads.
    """

    def __init__(self, call: Any, peer: str) -> None:
        self._call = call
        self._peer = peer
        self._arrived: queue.SimpleQueue[MoveProgress | grpc.RpcError | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="ps-moves", daemon=True).start()

    def __iter__(self) -> Iterator[MoveProgress]:
        """Yields at the start and after each batch, until all has been moved. Raises PsError."""
        while (arrived := self._arrived.get()) is not None:
            if isinstance(arrived, grpc.RpcError):
                raise translate(arrived, self._peer) from arrived
            yield arrived

    def cancel(self) -> None:
        """Begin no other batch: the one under way is made or undone, and what was moved stays."""
        self._call.cancel()

    def _read(self) -> None:
        try:
            for message in self._call:
                self._arrived.put(convert.progress_from_pb(message))
            self._arrived.put(None)
        except grpc.RpcError as error:
            self._arrived.put(error)


class CoordinatorClient:
    """The coordinator's calls, blocking. Any thread may use it; each call but watch and move has a deadline.

    Every call is safe to repeat (the .proto says so), so all but heartbeat, leave, watch, move and those about
    checkpoints are repeated with growing pauses until ``timeout_seconds`` have passed, then raise Unavailable. Errors
    are ps_protocol.errors.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._peer = f"the coordinator at {address}"
        self._channel = connect_channel(address)
        self._stub: Any = CoordinatorStub(self._channel)  # type: ignore[no-untyped-call]
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls in progress fail with Unavailable."""
        self._closed.set()
        self._channel.close()

    def wait_until_reachable(self, timeout_seconds: float, on_wait: Callable[[str], None] = lambda text: None) -> None:
        """Return once the coordinator answers; tell ``on_wait`` every few seconds.

        Raises Unavailable, naming address and remedy, after ``timeout_seconds``.
        """
        begin = time.monotonic()
        while True:
            left = begin + timeout_seconds - time.monotonic()
            try:
                self._once("GetStatus", pb.GetStatusRequest(), min(left, WAIT_REPORT_SECONDS), wait_for_ready=True)
                return
            except Unavailable:
                if self._closed.is_set():
                    raise
                passed = time.monotonic() - begin
                why = why_unreachable("it", self.address)
                if passed >= timeout_seconds:
                    # Without what was tried before: its tracebacks say nothing more.
                    raise Unavailable(
                        f"{self._peer} did not answer within {timeout_seconds:g} s: {why.message}",
                        remedy=f"start it there (ps-coordinator or ps-run), or give the right address: PS_COORDINATOR; "
                        f"{why.remedy}",
                    ) from None
                on_wait(f"waiting for {self._peer} since {passed:.0f} s, up to {timeout_seconds:g} s: {why.message}")
                self._closed.wait(_FIRST_PAUSE_SECONDS)

    def connect(self, timeout_seconds: float = CONNECT_SECONDS) -> None:
        """Return once the coordinator answers, for commands that a person waits for.

        Raises Unavailable, saying why: at once for a name that nobody knows and a port where nothing listens, for what
        is silent after ``timeout_seconds``.
        """
        host, port = split_address(self.address)
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except socket.gaierror:
            raise why_unreachable(self._peer, self.address) from None
        try:
            self._once("GetStatus", pb.GetStatusRequest(), timeout_seconds)
        except Unavailable:
            raise why_unreachable(self._peer, self.address) from None

    def join(self, spec: JoinSpec, token: str, timeout_seconds: float = CALL_SECONDS) -> Joined:
        """Become a member. ``token`` is random and the same for each repetition by one process.

        Raises ProtocolVersionMismatch, UnknownShard, InvalidRequest, Fenced for a shard whose place has newer state
        elsewhere than ``spec.data_incarnation``, NotReady for a place that is not to be had now, or PlaceTaken for one
        that another process holds; while that is silent it waits, up to the end of its lease.
        """
        request = pb.JoinRequest(
            role=convert.role_to_pb(spec.role),
            index=spec.index,
            address=spec.address,
            protocol_version=PROTOCOL_VERSION,
            token=token,
            host=socket.gethostname(),
            pid=os.getpid(),
            data_incarnation=spec.data_incarnation,
            directory=spec.directory,
            yields=spec.yields,
            add=spec.add,
            lineage=os.environ.get(LINEAGE_VARIABLE, ""),
            take_over=spec.take_over,
        )
        return convert.joined_from_pb(self._call("Join", request, timeout_seconds), spec.role, spec.address)

    def heartbeat(
        self,
        member: Member,
        stats: MemberStats,
        timeout_seconds: float = CALL_SECONDS,
        *,
        keeps_state: bool = False,
        sync: SyncWord | None = None,
        journal_mark: bytes = b"",
    ) -> bytes:
        """Renew the lease of ``member``, once; returns the mark of the coordinator's journal.

        ``journal_mark``: the newest that this member was told. Raises Fenced, or DamagedData when the coordinator has
        come back with an older journal.
        """
        request = _heartbeat(member, stats, keeps_state, sync, journal_mark)
        mark: bytes = self._once("Heartbeat", request, timeout_seconds).journal_mark
        return mark

    def announce_state(self, member: Member, stats: MemberStats, timeout_seconds: float = CALL_SECONDS) -> None:
        """Say that the state of shard ``member`` is on disk under its incarnation; older state is refused from then on.

        Raises Fenced when the place was lost before.
        """
        self._call("Heartbeat", _heartbeat(member, stats, keeps_state=True), timeout_seconds)

    def say_sync(self, member: Member, stats: MemberStats, word: SyncWord, timeout_seconds: float) -> None:
        """Return once the coordinator knows ``word`` of shard ``member``. Raises Fenced, Unavailable."""
        self._call("Heartbeat", _heartbeat(member, stats, keeps_state=True, sync=word), timeout_seconds)

    def leave(self, member: Member, reason: str = "", timeout_seconds: float = CALL_SECONDS) -> None:
        """End the membership of ``member``, tried once. ``reason`` is empty at a clean end. Raises Fenced."""
        request = pb.LeaveRequest(
            role=convert.role_to_pb(member.role), index=member.index, incarnation=member.incarnation, reason=reason
        )
        self._once("Leave", request, timeout_seconds)

    def watch(self, known_revision: int = 0, journal_mark: bytes = b"", member: Member | None = None) -> ViewStream:
        """The cluster as it is, when that is not ``known_revision``, then after every change. Waits to connect.

        ``journal_mark``: as for ``heartbeat``. ``member``: who watches; when its stream ends the coordinator takes it
        for lost sooner.
        """
        request = pb.WatchRequest(known_revision=known_revision, journal_mark=journal_mark)
        if member is not None:
            request.role = convert.role_to_pb(member.role)
            request.index, request.incarnation = member.index, member.incarnation
        return ViewStream(self._stub.Watch(request, wait_for_ready=True), self._peer)

    def declare_model(self, worker: Member, spec: ModelSpec, timeout_seconds: float = CALL_SECONDS) -> ShardMap:
        """Declare a model: the first is placed, a later one must match.

        Raises ModelMismatch, NotReady while shards are missing, InvalidRequest or Fenced.
        """
        request = pb.DeclareModelRequest(rank=worker.index, incarnation=worker.incarnation, spec=spec_to_pb(spec))
        return shard_map_from_pb(self._call("DeclareModel", request, timeout_seconds))

    def get_shard_map(self, model: str, timeout_seconds: float = CALL_SECONDS) -> ShardMap:
        """Where the slices of ``model`` live. Raises UnknownModel."""
        return shard_map_from_pb(self._call("GetShardMap", pb.GetShardMapRequest(model=model), timeout_seconds))

    def set_consistency(self, consistency: Consistency, timeout_seconds: float = CALL_SECONDS) -> ClusterView:
        """Change the mode of the job. Raises InvalidRequest when it does not fit the cluster."""
        request = pb.SetConsistencyRequest(consistency=consistency_to_pb(consistency))
        return convert.view_from_pb(self._call("SetConsistency", request, timeout_seconds))

    def barrier(
        self, worker: Member, phase: int, wait_seconds: float, timeout_seconds: float = CALL_SECONDS
    ) -> BarrierState:
        """Arrive at the barrier that ends ``phase`` and wait there up to ``wait_seconds``; ask again if not released.

        ``timeout_seconds`` come on top, for a coordinator that does not answer. Raises Fenced.
        """
        request = pb.BarrierRequest(
            rank=worker.index, incarnation=worker.incarnation, phase=phase, wait_seconds=wait_seconds
        )
        return convert.barrier_from_pb(self._call("Barrier", request, wait_seconds + timeout_seconds))

    def lease_data(
        self, worker: Member, ask: LeaseAsk, wait_seconds: float = 0.0, timeout_seconds: float = CALL_SECONDS
    ) -> LeaseAnswer:
        """Report what was trained, then lease a range, waiting up to ``wait_seconds`` while others hold all there is.

        ``timeout_seconds`` come on top, for a coordinator that does not answer. Raises Fenced, or InvalidRequest for
        another dataset than the one known by this name.
        """
        request = ask_to_pb(worker, ask, wait_seconds)
        return answer_from_pb(self._call("LeaseData", request, wait_seconds + timeout_seconds))

    def checkpoint(self, timeout_seconds: float = CHECKPOINT_SECONDS) -> tuple[str, int, float]:
        """Have a checkpoint made: its folder, its bytes, the seconds it took.

        Raises InvalidRequest when the coordinator has no directory for them, NotReady, Unavailable, StorageFull.
        """
        reply = self._once("Checkpoint", pb.CheckpointRequest(), timeout_seconds, wait_for_ready=True)
        return reply.folder, reply.size_bytes, reply.seconds

    def restore_checkpoint(
        self, folder: str = "", timeout_seconds: float = CHECKPOINT_SECONDS
    ) -> tuple[str, list[str]]:
        """Put ``folder``, else the newest checkpoint, into the running job: the folder, and the models it held.

        Raises InvalidRequest, ModelMismatch, DamagedData, NotReady, Unavailable.
        """
        request = pb.RestoreCheckpointRequest(folder=folder)
        reply = self._once("RestoreCheckpoint", request, timeout_seconds, wait_for_ready=True)
        return reply.folder, list(reply.models)

    def move(
        self,
        to: Collection[int] = (),
        drain: Collection[int] = (),
        model: str = "",
        variable: str = "",
        batch_bytes: int = 0,
    ) -> MoveStream:
        """Have slices moved while the job trains, until the stream ends.

        ``to``: shards that hold slices from then on. ``drain``: shards that hold none. Neither: balance anew. With
        ``model`` and ``variable`` only that one moves, to the one shard in ``to``. ``batch_bytes`` move while training
        holds still once; 0: the default. The stream raises UnknownShard, UnknownModel, InvalidRequest, NotReady,
        Unavailable, StorageFull.
        """
        request = pb.ReshardRequest(to=to, drain=drain, model=model, variable=variable, batch_bytes=batch_bytes)
        return MoveStream(self._stub.Reshard(request), self._peer)

    def get_status(self, timeout_seconds: float = CALL_SECONDS, *, once: bool = False) -> ClusterStatus:
        """The view, and every member with its last statistics. ``once``: not repeated where nobody answers."""
        call = self._once if once else self._call
        return convert.status_from_pb(call("GetStatus", pb.GetStatusRequest(), timeout_seconds))

    def _once(self, method: str, request: Any, timeout_seconds: float, *, wait_for_ready: bool = False) -> Any:
        if self._closed.is_set():
            raise Unavailable(f"the connection to {self._peer} was closed")
        try:
            return getattr(self._stub, method)(
                request, timeout=max(timeout_seconds, 0.001), wait_for_ready=wait_for_ready
            )
        except grpc.RpcError as error:
            raise translate(error, self._peer) from error
        except ValueError as error:
            # gRPC's answer to a call on a channel that another thread closes just now.
            if not self._closed.is_set():
                raise
            raise Unavailable(f"the connection to {self._peer} was closed") from error

    def _call(self, method: str, request: Any, timeout_seconds: float) -> Any:
        deadline = time.monotonic() + timeout_seconds
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return self._once(method, request, deadline - time.monotonic(), wait_for_ready=True)
            except Unavailable:
                if time.monotonic() + pause >= deadline or self._closed.wait(pause):
                    raise
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _heartbeat(
    member: Member, stats: MemberStats, keeps_state: bool, sync: SyncWord | None = None, journal_mark: bytes = b""
) -> pb.HeartbeatRequest:
    return pb.HeartbeatRequest(
        role=convert.role_to_pb(member.role),
        index=member.index,
        incarnation=member.incarnation,
        stats=convert.stats_to_pb(stats),
        keeps_state=keeps_state,
        sync=pb.SyncWord(number=sync.number, directory=sync.directory) if sync else None,
        journal_mark=journal_mark,
    )
