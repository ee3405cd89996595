"""A worker's session in the cluster: membership, channels to the shards, and the barriers it has passed."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

import grpc
import torch

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.client.membership import Membership
from ps_protocol.cluster.exchange import ExchangeKey, ExchangeState
from ps_protocol.cluster.leases import LeaseAnswer, LeaseAsk
from ps_protocol.cluster.scaling import ScaleAsk
from ps_protocol.cluster.transport import Transport
from ps_protocol.cluster.view import ClosedModelAsk, ClusterView, JoinRequest, Member, Role
from ps_protocol.cluster.weights import PublishAsk
from ps_protocol.errors import ModelReleased, NotReady, Retryable, StateLost, Unavailable, UnknownModel
from ps_protocol.logs import describe_process
from ps_protocol.model.spec import Consistency, ModelSpec, ShardMap
from ps_protocol.retry import COORDINATOR, Attempts
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_protocol.security.settings import SecuritySettings
from ps_protocol.times import BRIEF_CALL_SECONDS, REPEATED_CALL_SECONDS, SHARD_CALL_SECONDS
from ps_worker import times
from ps_worker.host.folder import HostFolder
from ps_worker.host.leader import Leaders
from ps_worker.host.messages import HostWorker
from ps_worker.session.alive import AliveFile
from ps_worker.session.config import TRANSPORTS, WorkerConfig
from ps_worker.session.device import check_device, device_of
from ps_worker.session.instruments import Instruments
from ps_worker.session.reporting import Progress, WorkerCounters, log, missing
from ps_worker.session.terminate import TerminationGuard


def wait_until_started(
    membership: Membership, config: WorkerConfig, hint: Callable[[str], None], deadline: float
) -> None:
    """Return once the job has started. ``deadline`` is of time.monotonic(). Raises Unavailable after it, Fenced."""
    while True:
        try:
            membership.wait_for(lambda view: view.started, min(1.0, max(0.0, deadline - time.monotonic())))
            return
        except NotReady:
            view = membership.view
        lacking = missing(view)
        if time.monotonic() >= deadline:
            raise Unavailable(
                f"the cluster is not complete after {config.connect_timeout_seconds:g} s: {lacking} missing",
                expected=f"{view.expected_shards} shards and {view.expected_workers or view.least_workers} workers",
                remedy="start what is missing, or wait longer with PS_CONNECT_TIMEOUT",
            )
        hint(f"waiting for {lacking}")


def _entered_host(config: WorkerConfig) -> HostFolder | None:
    """Where a worker meets the others of its host, if it is to; None, and a warning, where that cannot be."""
    if not config.per_host or config.role is not Role.WORKER:
        return None
    try:
        return HostFolder(config.coordinator)
    except OSError as error:
        log.warning("model.options", "this worker pushes by itself, apart from the others of its host: %s", error)
        return None


if TYPE_CHECKING:
    from ps_protocol.metrics.server import MetricsServer

T = TypeVar("T")


class Session:
    """A live membership with its channels, phase and statistics.

    Made by ``join``; its methods are called from the user's thread. ``leave`` and ``close`` may be repeated, and do
    nothing in a forked child (a DataLoader's process): the membership is the parent's.
    """

    #: Other workers live in this process, and one at a time runs: what gives them their turns also notices deadlocks.
    takes_turns = False
    #: Where this worker meets the others of its host; None: it pushes by itself.
    host: HostFolder | None = None
    #: Entered around exchanges with shards, which may wait for other workers.
    exchanging: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)

    def __init__(self, config: WorkerConfig, client: CoordinatorClient, membership: Membership) -> None:
        self._config = config
        self._client = client
        #: Of models that this worker pushes for others of its host.
        self.host_leaders = Leaders()
        self._membership = membership
        self._pid = os.getpid()
        self._closed = threading.Event()
        #: Barriers passed.
        self.phase = membership.phase_at_join
        #: The shards as last seen, also while they are away.
        self._shards: dict[int, Member] = {}
        self._seen = ClusterView()
        self._channels: dict[str, grpc.Channel] = {}
        #: Called when shards may have been replaced; assigned as a whole.
        self._on_shards: tuple[Callable[[], None], ...] = ()
        #: Optimizer steps made; written by one thread at a time. Calls of ``step`` that returned, by the user's thread.
        self.steps = self.stepped = 0
        self.termination = TerminationGuard(config.termination_seconds)
        self.sequences = itertools.count(1)  # of requests about data
        #: By leased dataset that is iterated, what ends that: a worker has the leases of one iteration of a dataset.
        self.iterating: dict[str, Callable[[], None]] = {}
        #: Statistics and log messages of this worker; traces, and event files of TensorBoard.
        self.progress = Progress(membership.member)
        self.instruments = Instruments()
        self._metrics: MetricsServer | None = None
        self._alive: AliveFile | None = None
        #: Raises an error when a server that this process started has ended; None: it has started none.
        self.check_own_servers: Callable[[], None] | None = None

    @classmethod
    def join(cls, config: WorkerConfig) -> Self:
        """Become a member and wait until the cluster is complete; the log names what is missing.

        Raises Unavailable, naming what was missing, after ``connect_timeout_seconds``; ConfigError for a device torch
        does not know, and for a file for liveness probes that cannot be written; ProtocolVersionMismatch.
        """
        check_device(config.device)
        deadline = time.monotonic() + config.connect_timeout_seconds
        client = CoordinatorClient(config.coordinator, config.opened_security())
        host = _entered_host(config)
        try:
            spec = JoinRequest(config.role, config.rank, take_over=config.take_over)
            membership = Membership.join(client, spec, config.connect_timeout_seconds, partial(log.warning, "waiting"))
        except BaseException:
            client.close()
            if host is not None:
                host.close()
            raise
        session = cls(config, client, membership)
        session.host = host
        try:
            if host is not None:
                host.name(HostWorker(session.rank, session.incarnation))
            session._serve_metrics()
            if config.alive_file is not None:
                alive = session._alive = AliveFile(config.alive_file)
                membership.subscribe(lambda _: None, lambda _: alive.stop())
            membership.set_stats(session.progress.stats)
            member = membership.member
            describe_process(role=config.role.value, worker=member.index, incarnation=member.incarnation)
            if membership.job:
                describe_process(job=membership.job)
            membership.subscribe(session._on_view)
            session.instruments.open(os.environ, member)
            session._wait_until_started(deadline)
        except BaseException as error:
            session.leave(f"{type(error).__name__} while waiting for the cluster to be complete")
            session.close()
            raise
        return session

    def _wait_until_started(self, deadline: float) -> None:
        wait_until_started(self._membership, self._config, self.wait_hint, deadline)

    def leave(self, reason: str = "") -> None:
        """Leave the cluster, so that no member waits for this worker; raises nothing.

        At a clean end it waits up to the reconnect timeout for a coordinator that is away, else a few seconds.
        """
        if self.own_process:
            self._closed.set()
            seconds = self._config.reconnect_timeout_seconds
            try:
                if self.check_own_servers is not None:
                    self.check_own_servers()
            except StateLost:
                seconds = 0.0  # The script ran alone: nobody else waits, and the coordinator may be what has ended.
            self._membership.leave(reason, seconds)

    def close(self) -> None:
        """End threads and channels; comes after ``leave``."""
        if self.own_process:
            self._closed.set()
            if self._alive is not None:
                self._alive.remove()
            self._membership.close()
            if self.host is not None:
                self.host.close()
                self.host = None
            for channel in self._channels.values():
                channel.close()
            self._client.close()
            self.instruments.close()
            if self._metrics is not None:
                self._metrics.close()

    def _serve_metrics(self) -> None:
        """Serve metrics if the settings name a port. Raises ConfigError."""
        if self._config.metrics_port is None:
            return
        # Here, because prometheus_client takes a while to import.
        from ps_worker.session.metrics import start_server

        self._metrics = start_server(self._config, self._membership.member, self.progress, self._membership.job)
        self.progress.metrics_address = self._metrics.address
        log.info("server.started", "%s: metrics at %s", self._membership.member, self._metrics.url)

    @property
    def counters(self) -> WorkerCounters:
        """Durations and waits of steps."""
        return self.progress.counters

    @property
    def own_process(self) -> bool:
        """Whether this is the process that joined, not a forked child of it."""
        return os.getpid() == self._pid

    @property
    def config(self) -> WorkerConfig:
        """The settings of this worker."""
        return self._config

    @property
    def rank(self) -> int:
        """Number of this worker, or an evaluator's number."""
        return self._membership.member.index

    @property
    def incarnation(self) -> int:
        """The number of this worker process; higher than that of every earlier one."""
        return self._membership.member.incarnation

    @property
    def view(self) -> ClusterView:
        """The newest view of the cluster."""
        return self._membership.view

    @property
    def revision(self) -> int:
        """Membership revision that includes this worker."""
        return self.view.revision

    @property
    def device(self) -> torch.device:
        """The device of the user's model: as configured, else a GPU where there is one."""
        return device_of(self._config.device, self.rank)

    def check(self) -> None:
        """Raises Fenced when this worker lost its place, StateLost when a server of the script's own has ended."""
        if self._membership.fenced is not None:
            self._membership.check()
        if self.check_own_servers is not None:
            self.check_own_servers()

    def initialiser(self) -> bool:
        """Whether this is the lowest live rank now."""
        return self._config.role is Role.WORKER and self.rank == min(self.view.live(Role.WORKER), default=-1)

    def shard_address(self, shard: int) -> str:
        """host:port of the shard, the last known one while it is away. Raises Unavailable if it was never there."""
        return self._shard(shard).address

    def shard_incarnation(self, shard: int) -> int:
        """The incarnation of the shard in the newest view. Raises Unavailable."""
        return self._shard(shard).incarnation

    def shard_channel(self, shard: int) -> grpc.Channel:
        """A channel to the shard's present address; one per address, closed with the session."""
        address = self.shard_address(shard)
        if address not in self._channels:
            self._channels[address] = self._membership.open_shard(address)
        return self._channels[address]

    def on_shards(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, from the watch thread, when shards may have been replaced. It must not block."""
        self._on_shards = (*self._on_shards, callback)

    def forget(self, callback: Callable[[], None]) -> None:
        """Remove ``callback``."""
        self._on_shards = tuple(each for each in self._on_shards if each != callback)

    def _on_view(self, _: ClusterView) -> None:
        for callback in self._on_shards:
            callback()

    def _shard(self, shard: int) -> Member:
        view = self.view
        if view is not self._seen:
            # In this order: a thread that sees the new ``_seen`` sees the new shards.
            self._shards.update(view.live(Role.SHARD))
            self._seen = view
        if shard not in self._shards:
            raise Unavailable(f"shard {shard} is not there", shard=str(shard), remedy="start it: ps-server --shard …")
        return self._shards[shard]

    def declare(self, spec: ModelSpec) -> ShardMap:
        """Declare a model. Raises ModelMismatch when the job's differs, Unavailable or NotReady."""
        return self._persist(lambda seconds: self._client.declare_model(self._membership.member, spec, seconds))

    def close_model(self, ask: ClosedModelAsk) -> None:
        """See CoordinatorClient.close_model; for a release, repeated until the other workers have closed it, too."""
        member, wait = self._membership.member, times.WAIT_SECONDS * ask.release
        self._persist(lambda seconds: self._client.close_model(member, ask, wait, seconds))

    def epoch(self, model: str) -> int:
        """The epoch of the model's shard map in the newest view; 0: it has none."""
        return self.view.models.get(model, 0)

    def shard_map(self, model: str) -> ShardMap:
        """The shards of the model's slices. Raises UnknownModel when no worker has declared it."""
        return self._persist(lambda seconds: self._client.get_shard_map(model, seconds))

    def is_declared(self, model: str) -> bool:
        """Ask the coordinator whether a worker has declared the model; the view that contains it may not have
        arrived.
        """
        with suppress(ModelReleased, UnknownModel):
            return self.shard_map(model).epoch > 0
        return False

    def set_consistency(self, consistency: Consistency) -> None:
        """Change the mode of the whole job. Raises InvalidRequest when it does not fit the job."""
        # The coordinator answers when all shards have the mode, which takes as long as their pushes do.
        self._persist(lambda seconds: self._client.set_consistency(consistency, max(seconds, SHARD_CALL_SECONDS)))

    def publish(self, ask: PublishAsk) -> Iterator[tuple[int, bool]]:
        """See CoordinatorClient.publish. Called in a thread."""
        return self._client.publish(self._membership.member, ask)

    def scale(
        self, ask: ScaleAsk, wait: bool, timeout_seconds: float | None, security: SecuritySettings | None = None
    ) -> str:
        """Set the number of workers and shards. Returns what the job waits for; with ``wait``, what it has afterwards.

        ``security``: credentials of an admin. Raises what ``CoordinatorClient.scale`` raises.
        """
        with ExitStack() as opened:
            client = self._client
            if security is not None:
                admin = Security(security, AccessRole.ADMIN)
                client = opened.enter_context(CoordinatorClient(self._config.coordinator, admin))
            steps = opened.enter_context(closing(iter(client.scale(ask, timeout_seconds))))
            text = ""
            for step in steps:
                text = step.text
                if not wait:
                    break
            return text

    def pass_barrier(self, announce: Callable[[], None]) -> None:
        """Wait until every live worker is at this phase's barrier, then enter the next phase. Raises Fenced.

        ``announce`` reports the arrival to the shards; it is repeated, since a stream may break meanwhile.
        """
        member = self._membership.member
        while True:
            self.check()
            # The shards first: from now on no step of the ending phase waits for this worker.
            announce()
            reply = self._persist(lambda left: self._client.barrier(member, self.phase, times.WAIT_SECONDS, left))
            if reply.released:
                break
            self.wait_hint("waiting at the barrier for worker " + ", ".join(map(str, reply.missing_ranks)))
        self.phase += 1

    def exchange(self, key: ExchangeKey, payload: bytes, wait_seconds: float) -> ExchangeState:
        """See CoordinatorClient.exchange; repeated while the coordinator is away."""
        return self._persist(lambda s: self._client.exchange(self._membership.member, key, payload, wait_seconds, s))

    def try_exchange(self, key: ExchangeKey, payload: bytes) -> ExchangeState:
        """``exchange`` once, waiting neither for other workers nor for a coordinator that is away. Raises PsError."""
        return self._client.exchange(self._membership.member, key, payload, 0.0, BRIEF_CALL_SECONDS)

    def record_step(self, samples: int | None, staleness: int, bytes: int, clock: int = 0) -> None:
        """Count one push; ``bytes`` were transferred in both directions. ``clock``: of this phase, with the push."""
        self.steps += 1
        self.progress.record_step(bytes, staleness)
        self.progress.position = self.phase, clock
        if samples:
            self.progress.record_samples(samples)

    @property
    def seed(self) -> int:
        """Common seed of the job."""
        return self._membership.seed

    @property
    def lease_seconds(self) -> float:
        """How long a silent member is kept."""
        return self._membership.lease_seconds

    @property
    def elastic(self) -> bool:
        """Whether the number of workers is not fixed."""
        return not self.view.expected_workers

    @property
    def patience_seconds(self) -> float:
        """How long to wait for a coordinator that does not answer."""
        return self._config.reconnect_timeout_seconds

    def lease_data(self, ask: LeaseAsk, wait_seconds: float, timeout_seconds: float) -> LeaseAnswer:
        """See CoordinatorClient.lease_data. Any thread may call it."""
        return self._client.lease_data(self._membership.member, ask, wait_seconds, timeout_seconds)

    @property
    def security(self) -> Security:
        """TLS and tokens of this process."""
        return self._client.security

    @property
    def transports(self) -> Sequence[Transport]:
        """Side channels to be tried, best first."""
        return TRANSPORTS[self._config.transport]

    @property
    def consistency(self) -> Consistency:
        """The job's mode now."""
        return self.view.consistency

    @property
    def pushes_with_host(self) -> bool:
        """Whether this worker is to push together with the others of its host now."""
        return self.host is not None and (self._config.per_host is True or self.consistency.in_lockstep)

    @property
    def workers(self) -> Sequence[int]:
        """Ranks of the live workers, including this one, in ascending order."""
        return sorted({*self.view.live(Role.WORKER), self.rank})

    @property
    def lookahead(self) -> int:
        """How many steps late the mode lets parameters be used: 1 or 0."""
        return self.view.consistency.lookahead

    def record_transport(self, by_shard: Mapping[int, str]) -> None:
        """The transport of the stream to each shard; logged when it changes."""
        self.progress.record_transport(by_shard, self._config.transport)

    def wait_hint(self, text: str) -> None:
        """Log what the worker waits for, at most every 5 seconds."""
        self.progress.hint(text)

    def wait_for(self, predicate: Callable[[ClusterView], bool], timeout_seconds: float) -> bool:
        """Whether ``predicate`` was true of a view within the time. Raises Fenced."""
        try:
            self._membership.wait_for(predicate, timeout_seconds)
        except NotReady:
            return False
        return True

    def _persist(self, call: Callable[[float], T]) -> T:
        """``call(timeout_seconds)``, repeated while coordinator or shards are away, up to the reconnect timeout."""
        attempts = Attempts(COORDINATOR.within(self._config.reconnect_timeout_seconds))
        while True:
            try:
                return call(max(0.1, min(REPEATED_CALL_SECONDS, attempts.left_seconds)))
            except Retryable as error:
                if (pause := attempts.pause_after(error)) is None:
                    raise
                self.check()
                self.wait_hint(f"waiting: {error.message}")
                self._pause(pause)

    def _pause(self, seconds: float) -> None:
        self._closed.wait(seconds)
