"""Owns the cluster's state: passes events and the time to it, and answers waiting calls."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from ps_protocol.cluster.exchange import ExchangeKey, ExchangeState
from ps_protocol.cluster.job_state import growth, remedy
from ps_protocol.cluster.leases import LeaseAnswer, LeaseAsk
from ps_protocol.cluster.scaling import ScaleAsk
from ps_protocol.cluster.view import (
    BarrierState,
    ClosedModelAsk,
    ClusterStatus,
    ClusterView,
    Divergence,
    Joined,
    JoinRequest,
    Member,
    MemberStats,
    MemberStatus,
    Role,
    StandbyReport,
)
from ps_protocol.cluster.weights import (
    FollowAnswer,
    FollowAsk,
    PublishAsk,
    WeightsPiece,
    WeightsPin,
    WeightsState,
    WeightsVersion,
)
from ps_protocol.errors import PlaceTaken, Unavailable
from ps_protocol.logs import EventLogger
from ps_protocol.metrics.histogram import Histogram
from ps_protocol.model.spec import Consistency, ModelSpec, ShardMap
from ps_protocol.rpc.channel import OpenChannel, open_async_channel
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.coordinator.beginning import begin
from ps_server.coordinator.changes import StateChange
from ps_server.coordinator.divergence import DivergenceWatch
from ps_server.coordinator.event_log import EventLog
from ps_server.coordinator.lease_timer import LeaseTimer
from ps_server.coordinator.membership.scaling import WantedSize, scaled
from ps_server.coordinator.persistence.journal import Journal
from ps_server.coordinator.persistence.saved_facts import place_as_saved
from ps_server.coordinator.placement.declaration import PlacementPlan
from ps_server.coordinator.publications import SHOWN_READERS, PublishPlan
from ps_server.coordinator.settings import ClusterSettings
from ps_server.coordinator.views import Publisher

logger = EventLogger(__name__)


@dataclass(slots=True)
class CoordinatorCounters:
    """Counts since this process began. Written and read on the coordinator's event loop."""

    joins: Counter[Role] = field(default_factory=Counter)
    lease_expirations: Counter[Role] = field(default_factory=Counter)
    mode_changes: int = 0
    #: Numbers that were found to have grown far above their history.
    divergences: int = 0
    #: From a worker's arrival until the barrier opened for it, in seconds.
    barrier_wait: Histogram = field(default_factory=Histogram)
    #: By rank: incarnation, phase and time of the arrival at a barrier; None once it has opened.
    _arrivals: dict[int, tuple[int, int, float | None]] = field(default_factory=dict)

    def arrives(self, rank: int, incarnation: int, phase: int, now: float) -> None:
        """Note that a worker reaches the barrier that ends ``phase``; a repetition changes nothing."""
        known = self._arrivals.get(rank)
        if known is None or known[:2] != (incarnation, phase):
            self._arrivals[rank] = incarnation, phase, now

    def passes(self, rank: int, now: float) -> None:
        """Note that the barrier it waited for has opened; a repetition changes nothing."""
        incarnation, phase, since = self._arrivals.get(rank, (0, 0, None))
        if since is not None:
            self._arrivals[rank] = incarnation, phase, None
            self.barrier_wait.observe(now - since)


T = TypeVar("T")


class Driver:
    """The thin shell around ClusterState. Called by the service, on one event loop; a commit of the journal blocks it.

    A member counts as lost when its lease ends. Methods raise the errors of ClusterState.

    With a journal, answers and views are sent only once their contents are on disk: an incarnation is never assigned
    twice, a model never placed twice. While writing fails, calls with a new answer raise Unavailable, and members keep
    the last view.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        clock: Callable[[], float] = time.monotonic,
        journal: Journal | None = None,
        saved: Checkpoint | None = None,
        open_shard: OpenChannel = open_async_channel,
    ) -> None:
        """Continue where ``journal`` ends; without one, nothing is kept. ``clock`` is a steady clock in seconds.

        ``saved``: the checkpoint with the values of models that are not placed yet, and a new job's data positions and
        phase. ``open_shard`` opens a channel to a shard, with the credentials of the coordinator.

        Raises InvalidRequest for a mode that cannot work, ConfigError for settings that contradict the journal,
        DamagedData, or Unavailable when the journal cannot be written.
        """
        self._settings = settings
        #: For the coroutines beside the driver that call shards.
        self.open_shard = open_shard
        self._clock = clock
        #: The events of the job.
        self.events = EventLog()
        self._as_saved = partial(place_as_saved, saved) if saved else None
        begun = begin(settings, journal, saved, clock())
        self._state, self._data, self._exchanges = begun.state, begun.data, begun.exchanges
        if begun.records:
            self.events.add(f"the coordinator continues from its journal, with {len(begun.state.view.members)} members")
        self._pass_members()
        self._publisher = Publisher(begun, journal, clock)
        self._timer = LeaseTimer(self._state.membership, settings.heartbeat_seconds, clock, self._settle_expired)
        #: Counts since this process began.
        self.counters = CoordinatorCounters()
        #: What has grown far above its history.
        self.divergence = DivergenceWatch(self._state.view.consistency.mode)
        #: The address of this process's metrics; empty: not served.
        self.metrics_url = ""
        #: See ``ExpiryWatch.ends``; of this process.
        self.certificate_ends: Callable[[], float] = lambda: 0.0

    def start(self) -> None:
        """Start the lease timer. Call once, from the loop."""
        self._timer.start()

    async def close(self) -> None:
        """End the timer, every watch stream and every waiting call."""
        self._publisher.close()
        await self._timer.close()

    # Members

    def join(self, ask: JoinRequest) -> Joined:
        """See MembershipState.join."""
        decision = self._state.membership.join(ask, self._clock())
        self.counters.joins[ask.role] += bool(decision.reason)  # not a repetition
        self.divergence.joined(decision.value.member, self._now())
        return self._settle(decision)

    async def join_when_vacant(self, ask: JoinRequest, wait_seconds: float) -> Joined:
        """As ``join``; while the holder of the place is silent, this waits for the end of its lease.

        A process restarted by hand thus gets its place as soon as its predecessor counts as dead; one beside a live
        holder is refused at the holder's next heartbeat. Raises PlaceTaken after ``wait_seconds``.
        """
        deadline = self._clock() + wait_seconds
        begin = (membership := self._state.membership).heartbeats(ask.role)
        while True:
            self._publisher.check_open()
            try:
                return self.join(ask)
            except PlaceTaken as refusal:
                if not membership.is_silent(ask, begin) or self._clock() >= deadline:
                    logger.warning("caller.refused", "refused another process: %s", refusal)
                    raise
            left = max(0.0, deadline - self._clock())
            await self._publisher.wait_for_change(min(self._settings.heartbeat_seconds / 2, left))

    def heartbeat(
        self,
        role: Role,
        index: int,
        incarnation: int,
        stats: MemberStats,
        *,
        keeps_state: bool = False,
        sync: StandbyReport | None = None,
        journal_mark: bytes = b"",
    ) -> int:
        """See MembershipState.heartbeat, check_journal; returns the view's revision. Writes only persisted state."""
        self.check_journal(journal_mark)
        beat = self._state.membership.heartbeat(
            role, index, incarnation, stats, self._clock(), keeps_state=keeps_state, sync=sync
        )
        if keeps_state:
            self._settle(beat)
        self._watch_divergence(self._state.membership.find(role, index, incarnation), stats)
        return self.view.revision

    def _watch_divergence(self, member: Member, stats: MemberStats) -> None:
        view, now = self._state.view, self._now()
        if begun := self.divergence.take(member, stats, view.models, now):
            self.counters.divergences += len(begun)
            staleness = {grown.what: grown for grown in self.divergence.divergences(now)}
            for grown in begun:
                text = remedy(staleness.get(grown.what, grown), view.consistency)
                logger.warning("divergence", "the model diverges: %s; %s", growth(grown), text)

    def acknowledge_divergence(self) -> tuple[Divergence, ...]:
        """See DivergenceWatch.acknowledge."""
        found = self.divergence.acknowledge(self._now())
        for grown in found:
            logger.info("divergence", "acknowledged, and usual from now on: %s", growth(grown))
        return found

    def _now(self) -> float:
        """Seconds since 1970, on the steady clock."""
        return self._settings.clock_began + self._clock()

    @property
    def heartbeat_seconds(self) -> float:
        """See MembershipState.heartbeat_seconds."""
        return self._state.membership.heartbeat_seconds

    def leave(self, role: Role, index: int, incarnation: int, why: str) -> None:
        """See MembershipState.leave."""
        self._settle(self._state.membership.leave(role, index, incarnation, why, self._clock()))

    def stream_opened(self, role: Role, index: int, incarnation: int) -> None:
        """See MembershipState.connected. The process need not be a member any more."""
        self._state.membership.connected(role, index, incarnation)

    def stream_ended(self, role: Role, index: int, incarnation: int) -> None:
        """See MembershipState.disconnected. The process need not be a member any more."""
        self._state.membership.disconnected(role, index, incarnation, self._clock())

    def check_member(self, role: Role, index: int, incarnation: int) -> None:
        """Raises Fenced unless this is a live member."""
        self._state.membership.find(role, index, incarnation)

    @property
    def shard_tokens(self) -> Mapping[int, str]:
        """The token that each live shard joined with, by its incarnation. Secret."""
        return self._state.membership.shard_tokens

    async def barrier(self, rank: int, incarnation: int, phase: int, wait_seconds: float) -> BarrierState:
        """Arrive, and wait up to ``wait_seconds`` (30 s at most) for the barrier to open."""

        def arrive() -> BarrierState:
            decision = self._state.membership.arrive(rank, incarnation, phase)
            self.counters.arrives(rank, incarnation, phase, self._clock())
            state = self._settle(decision)
            if state.released:
                self.counters.passes(rank, self._clock())
            return state

        return await self._publisher.repeat(arrive, lambda state: state.released, wait_seconds)

    async def exchange(
        self, rank: int, incarnation: int, key: ExchangeKey, payload: bytes, wait_seconds: float
    ) -> ExchangeState:
        """See Exchanges.give; waits up to ``wait_seconds`` (30 s at most) until it is complete. Raises Fenced."""

        def give() -> ExchangeState:
            self._state.membership.find(Role.WORKER, rank, incarnation)
            before = self._exchanges.newest
            state = self._exchanges.give(rank, incarnation, key, payload)
            # Results are not logged, but must be on disk before they are sent.
            self._publisher.publish(changed=self._exchanges.newest > before)
            return state

        return await self._publisher.repeat(give, lambda state: state.complete, wait_seconds)

    # Models

    def plan(self, rank: int, incarnation: int, spec: ModelSpec) -> PlacementPlan:
        """See PlacementState.plan. Raises Fenced."""
        worker = self._state.membership.find(Role.WORKER, rank, incarnation)
        return self._state.placement.plan(worker, spec, self._as_saved)

    def adopt(self, rank: int, incarnation: int, plan: PlacementPlan, made: ShardMap) -> ShardMap:
        """See PlacementState.adopt. Raises Fenced."""
        worker = self._state.membership.find(Role.WORKER, rank, incarnation)
        decision = self._state.placement.adopt(worker, plan, made)
        # No reason is logged if the model exists, but the journal must record that this worker uses it.
        self._publisher.write()
        return self._settle(decision)

    def shard_map(self, model: str) -> ShardMap:
        """See PlacementState.shard_map."""
        return self._settle(StateChange(self._state.placement.shard_map(model)))

    @property
    def shard_maps(self) -> Mapping[str, ShardMap]:
        """Where each model is placed."""
        return self._state.placement.shard_maps

    async def close_model(
        self, rank: int, incarnation: int, ask: ClosedModelAsk, wait_seconds: float
    ) -> Collection[int]:
        """See PlacementState.close; then wait up to ``wait_seconds`` (30 s at most) until no worker uses the model.

        Returns the ranks that still do. Raises Fenced.
        """
        model, epoch = ask.model, ask.epoch
        placement = self._state.placement
        worker = self._state.membership.find(Role.WORKER, rank, incarnation)
        self._settle(placement.close(worker, model, epoch))

        def users() -> Collection[int]:
            return (
                () if self.view.was_released(model, epoch) else placement.uses.ranks(model, self.view.live(Role.WORKER))
            )

        return await self._publisher.repeat(users, lambda ranks: not ranks, wait_seconds)

    def release_model(self, model: str, epoch: int = 0) -> int:
        """See PlacementState.release."""
        decision = self._state.placement.release(model, epoch)
        # Before the first of them is written: a restart finds both or none.
        dropped = self._state.publications.drop_model(model) if decision.reason else StateChange(None)
        size_bytes = self._settle(decision)
        self._settle(dropped)
        return size_bytes

    # Published weights

    def plan_publication(self, rank: int, incarnation: int, ask: PublishAsk) -> PublishPlan:
        """See Publications.plan. Raises Fenced, UnknownModel, ModelReleased.

        Raises Unavailable while the journal does not have the version before: its publisher would be told of it, and
        shards would remove versions that a restarted coordinator still has.
        """
        self._publisher.publish()
        self._state.membership.find(Role.WORKER, rank, incarnation)
        shards = len(self._state.placement.shard_map(ask.model).holders)
        return self._state.publications.plan(ask, shards)

    def commit_publication(self, ask: PublishAsk, number: int, pieces: Iterable[WeightsPiece]) -> WeightsVersion:
        """See Publications.commit. Raises UnknownModel or ModelReleased where the model was released meanwhile."""
        self._state.placement.shard_map(ask.model)
        return self._settle(self._state.publications.commit(ask, number, pieces, self._clock(), self._now()))

    async def follow_weights(self, ask: FollowAsk, wait_seconds: float) -> FollowAnswer:
        """See Publications.follow; waits up to ``wait_seconds`` (30 s at most) for a version that is newer."""

        def follow() -> FollowAnswer:
            # A version is told once the journal has it.
            self._publisher.publish()
            state = self._state
            finished = state.view.finished
            return state.publications.follow(ask, state.membership.shard_homes, self._clock(), finished=finished)

        def answered(answer: FollowAnswer) -> bool:
            return answer.version is not None or answer.finished or ask.leaves

        return await self._publisher.repeat(follow, answered, wait_seconds)

    def pin_weights(self, name: str, pin: WeightsPin, seconds: float) -> None:
        """See Publications.pin."""
        self._settle(self._state.publications.pin(name, pin, seconds, self._now()))

    def weights(self, shown_readers: int = SHOWN_READERS) -> tuple[WeightsState, ...]:
        """See Publications.states."""
        return self._state.publications.states(self._state.membership.shard_homes, self._clock(), shown_readers)

    def begin_move(self, move: str) -> int:
        """See PlacementState.begin_move."""
        return self._settle(self._state.placement.begin_move(move))

    def commit_move(self, move: str, maps: Sequence[ShardMap], prepared: Mapping[int, int]) -> None:
        """See PlacementState.commit_move. It is final on return, and published as soon as the journal has it."""
        decision = self._state.placement.commit_move(move, maps, prepared)
        with suppress(Unavailable):  # the timer of the leases publishes it
            self._settle(decision)

    def abort_move(self, move: str) -> None:
        """See PlacementState.abort_move. It is final on return, and published as soon as the journal has it."""
        decision = self._state.placement.abort_move(move)
        with suppress(Unavailable):
            self._settle(decision)

    @property
    def wanted(self) -> WantedSize:
        """The wanted size since the job was scaled."""
        return self._state.wanted

    def scale(self, ask: ScaleAsk, *, by_count: bool = False) -> WantedSize:
        """See ClusterState.scale."""
        return self._settle(self._state.scale(ask, by_count=by_count))

    def choose_shards(self, numbers: Collection[int]) -> None:
        """See ClusterState.choose_shards."""
        self._settle(self._state.choose_shards(numbers))

    def check_scale(self, ask: ScaleAsk, *, by_count: bool = False) -> WantedSize:
        """The size that ``scale`` would set. Changes nothing; raises the same errors."""
        return scaled(self.wanted, ask, self.view, self._settings.most_workers, by_count=by_count)

    async def wait_for_change(self, seconds: float) -> None:
        """Return at the next change of the state, or after ``seconds``. Raises Unavailable once this is closed."""
        self._publisher.check_open()
        await self._publisher.wait_for_change(seconds)
        self._publisher.check_open()

    def use_shards(self, numbers: Collection[int]) -> None:
        """See ClusterState.use_shards."""
        self._settle(self._state.use_shards(numbers))

    # The job

    @property
    def settings(self) -> ClusterSettings:
        """The settings of the cluster at the start; the mode may have changed."""
        return self._settings

    @property
    def view(self) -> ClusterView:
        """The newest view that is published."""
        return self._publisher.view

    def views(self, known_revision: int, journal_mark: bytes = b"") -> AsyncIterator[ClusterView]:
        """See Publisher.views."""
        return self._publisher.views(known_revision, journal_mark)

    def status(self) -> ClusterStatus:
        """See ClusterState.status."""
        return replace(
            self._state.status(self._clock()),
            metrics_url=self.metrics_url,
            decisions=self.events.decisions,
            certificate_ends=self.certificate_ends(),
            divergences=self.divergence.divergences(self._now()),
        )

    @property
    def phase(self) -> int:
        """Barriers that the job has passed."""
        return self._state.membership.phase

    @property
    def lost_servers(self) -> tuple[MemberStatus, ...]:
        """See MembershipState.lost_servers."""
        return self._state.membership.lost_servers

    @property
    def fenced_calls(self) -> int:
        """Calls of processes that are not members any more."""
        return self._state.membership.fenced_calls

    @property
    def data_leases(self) -> tuple[int, int]:
        """Leases of data that workers hold, and the items in them."""
        return self._data.outstanding

    def set_consistency(self, consistency: Consistency) -> ClusterView:
        """See ClusterState.set_consistency."""
        before = self._state.view.consistency
        decision = self._state.set_consistency(consistency)
        self.counters.mode_changes += bool(decision.reason)
        if consistency.mode is not before.mode:
            self.divergence.restart(consistency.mode)
        return self._settle(decision)

    def release(self) -> None:
        """See ClusterState.release."""
        self._settle(self._state.release())

    def facts(self) -> Mapping[str, Any]:
        """The coordinator's part of a checkpoint: data positions, phase, seed; as JSON types."""
        return {
            "data": self._data.persisted_state(),
            "phase": self._state.membership.phase,
            "seed": self._settings.seed,
            "consistency": str(self.view.consistency),
        }

    async def lease_data(self, rank: int, incarnation: int, ask: LeaseAsk, wait_seconds: float) -> LeaseAnswer:
        """See DataLeases.lease; waits up to ``wait_seconds`` (30 s at most) while all items are leased."""

        def lease() -> LeaseAnswer:
            decision = self._data.lease(rank, incarnation, ask, self._clock())
            if not decision.reason and (ask.trained or decision.value.span is not None):
                # Leases are not logged, but must never be assigned twice.
                self._publisher.write()
            return self._settle(decision)

        return await self._publisher.repeat(
            lease, lambda answer: answer.span is not None or answer.done or not ask.lease_items, wait_seconds
        )

    # The journal

    @property
    def failed(self) -> asyncio.Event:
        """Set when the journal turned out to be an older one."""
        return self._publisher.failed

    @property
    def journal_mark(self) -> bytes:
        """See Publisher.journal_mark."""
        return self._publisher.journal_mark

    def check_journal(self, known: bytes) -> None:
        """See Publisher.check_journal."""
        self._publisher.check_journal(known)

    def check_failed(self) -> None:
        """See Publisher.check_failed."""
        self._publisher.check_failed()

    def _settle(self, decision: StateChange[T]) -> T:
        if decision.reason:
            if decision.loss:
                logger.warning("cluster.loss", "%s", decision.reason)
            else:
                logger.info("cluster.change", "%s", decision.reason)
            self.events.add(decision.reason, warning=decision.loss)
            self._pass_members()
        self._publisher.publish(changed=bool(decision.reason))
        return decision.value

    def _settle_expired(self, decision: StateChange[tuple[Member, ...]]) -> None:
        self.counters.lease_expirations.update(member.role for member in decision.value)
        self._settle(decision)

    def _pass_members(self) -> None:
        """Pass the members to the leases and the exchanges, so that workers that are gone have no leases and are not
        awaited.
        """
        live = {rank: member.incarnation for rank, member in self._state.view.live(Role.WORKER).items()}
        self._exchanges.members(live, self._state.membership.expected)
        if released := self._data.members(live).reason:
            logger.info("barrier.released", "%s", released)
