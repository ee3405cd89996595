"""Owns the cluster's state while the coordinator runs: feeds it events and time, and wakes those who wait for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from ps_protocol.errors import DamagedData, PlaceTaken, Unavailable
from ps_protocol.leases import LeaseAnswer, LeaseAsk
from ps_protocol.model import Consistency, ModelSpec, ShardMap
from ps_protocol.view import BarrierState, ClusterStatus, ClusterView, Joined, MemberStats, Role, SyncWord
from ps_server.checkpoint import Checkpoint
from ps_server.coordinator.applicant import Applicant
from ps_server.coordinator.data_leases import DataLeases
from ps_server.coordinator.journal import Journal
from ps_server.coordinator.memento import Memento, changed_rows, from_rows
from ps_server.coordinator.models import PlacementPlan
from ps_server.coordinator.placement import as_before
from ps_server.coordinator.saved_facts import saved_data, saved_phase
from ps_server.coordinator.settings import ClusterSettings
from ps_server.coordinator.state import ClusterState, Decision

logger = logging.getLogger(__name__)

BARRIER_WAIT_SECONDS = 30.0
"""The longest that one barrier call is parked; the caller asks again."""

RECONNECT_SECONDS = 3.0
"""What members have on top of a lease after a restart: gRPC tries an address again once a second, give or take."""

T = TypeVar("T")


class Driver:
    """The thin shell around ClusterState. Called by the service, on one event loop; a commit of the journal blocks it.

    A member's loss shows at the end of its lease. Whenever the loop's own timer comes late (a busy machine, a stopped
    process, a laptop asleep), all leases are extended by that time: nobody could have been heard. Methods raise what
    ClusterState raises.

    With a journal nothing is told, in an answer or in a view, before it is on disk: an incarnation is never handed out
    twice, a model never placed twice. While the disk refuses, calls that would tell something new raise Unavailable,
    and members keep the last view.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        clock: Callable[[], float] = time.monotonic,
        journal: Journal | None = None,
        saved: Checkpoint | None = None,
    ) -> None:
        """Go on where ``journal`` ends; without one, nothing is kept. ``clock`` is a steady clock in seconds.

        ``saved``: where models come from that have not been placed yet; a new job also goes on from its data and phase.

        Raises InvalidRequest for a mode that cannot work, ConfigError for settings that contradict the journal,
        DamagedData, or Unavailable when the journal cannot be written.
        """
        self._journal = journal
        #: What the journal says.
        self._kept: Memento | None = from_rows(journal.read(), str(journal.path)) if journal else None
        if journal is None or self._kept is None:
            phase = saved_phase(saved) if saved else 0
            self._state, self._data = ClusterState(settings, phase), DataLeases()
            if saved is not None:
                self._data = saved_data(saved)
                self._release_lost_leases()
        else:
            self._state = ClusterState.restore(settings, self._kept, clock())
            self._state.extend_leases(RECONNECT_SECONDS)
            self._data = DataLeases.restore(self._kept.data)
            self._release_lost_leases()
            view = self._state.view
            logger.info("goes on from %s: revision %d, %d members", journal.path, view.revision, len(view.members))
        self._saved = saved
        #: The newest view that is on disk; watchers see no other.
        self._view = self._state.view
        #: Something was decided that is not on disk yet, or not shown.
        self._untold = False
        self._write_down()
        self._view = self._marked_view()
        self._clock = clock
        self._settings = settings
        self._heartbeat_seconds = settings.heartbeat_seconds
        #: Set, and replaced by a new one, at every change of the state.
        self._changed = asyncio.Event()
        self._closing = False
        #: Set when the journal turned out to be an older one.
        self.failed = asyncio.Event()
        self._failure: DamagedData | None = None
        self._timer: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to end leases. Call once, from the loop."""
        self._timer = asyncio.create_task(self._end_leases(), name="coordinator-leases")

    async def close(self) -> None:
        """End the timer, every watch stream and every parked barrier."""
        self._closing = True
        self._wake()
        if self._timer is not None:
            self._timer.cancel()
            with suppress(asyncio.CancelledError):
                await self._timer

    def join(self, ask: Applicant) -> Joined:
        """See ClusterState.join."""
        return self._settle(self._state.join(ask, self._clock()))

    async def join_when_vacant(self, ask: Applicant, wait_seconds: float) -> Joined:
        """As ``join``; while who holds the place is silent it waits for the end of that one's lease.

        So a process that was started again by hand gets its place as soon as the one before it counts as dead, and a
        second one beside a live one is refused at that one's next heartbeat. Raises PlaceTaken after ``wait_seconds``.
        """
        deadline = self._clock() + wait_seconds
        begin = self._state.beats(ask.role)
        while True:
            self._check_open()
            try:
                return self.join(ask)
            except PlaceTaken as refusal:
                if not self._silent(ask, begin) or self._clock() >= deadline:
                    logger.warning("refused another process: %s", refusal)
                    raise
            await self._wait_for_change(min(self._heartbeat_seconds / 2, max(0.0, deadline - self._clock())))

    def _silent(self, ask: Applicant, begin: Mapping[tuple[int, int], int]) -> bool:
        """Whether a holder of the place, or of any, has not been heard of since ``begin``."""
        now = self._state.beats(ask.role)
        holders = {key: beats for key, beats in now.items() if ask.index in (None, key[0])}
        return any(begin.get(key) == beats for key, beats in holders.items())

    def heartbeat(
        self,
        role: Role,
        index: int,
        incarnation: int,
        stats: MemberStats,
        *,
        keeps_state: bool = False,
        sync: SyncWord | None = None,
        journal_mark: bytes = b"",
    ) -> int:
        """See ClusterState.heartbeat; returns the revision of the view. Writes nothing but news of kept state.

        ``journal_mark``: as in ``check_journal``.
        """
        self.check_journal(journal_mark)
        beat = self._state.heartbeat(role, index, incarnation, stats, self._clock(), keeps_state=keeps_state, sync=sync)
        if keeps_state:
            self._settle(beat)
        return self._view.revision

    def check_journal(self, known: bytes) -> None:
        """Raises DamagedData when the mark ``known``, which a member was told, proves that this journal is older.

        Then nothing is told any more, and ``failed`` is set: the process has to end.
        """
        self.check_failed()
        if self._journal is None:
            return
        try:
            self._journal.check_mark(known)
        except DamagedData as error:
            logger.error("%s", error)
            self._failure = error
            self.failed.set()
            self._wake()
            raise

    def check_failed(self) -> None:
        """Raises DamagedData when the journal turned out to be an older one."""
        if (known := self._failure) is not None:
            raise DamagedData(known.message, expected=known.expected, actual=known.actual, remedy=known.remedy)

    @property
    def journal_mark(self) -> bytes:
        """Of what may be told now; empty without a journal."""
        return self._journal.mark if self._journal else b""

    def disconnected(self, role: Role, index: int, incarnation: int) -> None:
        """See ClusterState.disconnected."""
        self._state.disconnected(role, index, incarnation, self._clock())

    def leave(self, role: Role, index: int, incarnation: int, why: str) -> None:
        """See ClusterState.leave."""
        self._settle(self._state.leave(role, index, incarnation, why, self._clock()))

    def declare(self, rank: int, incarnation: int, spec: ModelSpec) -> ShardMap:
        """See ClusterState.declare."""
        return self._settle(self._state.declare(rank, incarnation, spec, self._as_saved if self._saved else None))

    def check_member(self, role: Role, index: int, incarnation: int) -> None:
        """Raises Fenced unless this is a live member."""
        self._state.check_member(role, index, incarnation)

    def check_worker(self, rank: int, incarnation: int) -> None:
        """Raises Fenced unless this is a live worker."""
        self._state.check_member(Role.WORKER, rank, incarnation)

    def plan(self, rank: int, incarnation: int, spec: ModelSpec) -> PlacementPlan:
        """See ClusterState.plan."""
        return self._state.plan(rank, incarnation, spec, self._as_saved if self._saved else None)

    def adopt(self, rank: int, incarnation: int, plan: PlacementPlan, made: ShardMap) -> ShardMap:
        """See ClusterState.adopt."""
        return self._settle(self._state.adopt(rank, incarnation, plan, made))

    def shard_map(self, model: str) -> ShardMap:
        """See ClusterState.shard_map."""
        return self._settle(Decision(self._state.shard_map(model)))

    @property
    def shard_maps(self) -> Mapping[str, ShardMap]:
        """Where each model lives."""
        return self._state.shard_maps

    @property
    def shard_tokens(self) -> Mapping[int, str]:
        """The token that each live shard joined with, by its incarnation. Never told to anybody else."""
        return self._state.shard_tokens

    def begin_move(self, cut: str) -> int:
        """See ClusterState.begin_move."""
        return self._settle(self._state.begin_move(cut))

    def commit_move(self, cut: str, maps: Sequence[ShardMap], prepared: Mapping[int, int]) -> None:
        """See ClusterState.commit_move. It holds once this returns, and is told as soon as the journal has it."""
        decision = self._state.commit_move(cut, maps, prepared)
        with suppress(Unavailable):  # the timer of the leases tells it
            self._settle(decision)

    def abort_move(self, cut: str) -> None:
        """See ClusterState.abort_move. It holds once this returns, and is told as soon as the journal has it."""
        decision = self._state.abort_move(cut)
        with suppress(Unavailable):
            self._settle(decision)

    def use_shards(self, numbers: Collection[int]) -> None:
        """See ClusterState.use_shards."""
        self._settle(self._state.use_shards(numbers))

    def release(self) -> None:
        """See ClusterState.release."""
        self._settle(self._state.release())

    @property
    def view(self) -> ClusterView:
        """The newest view that may be told."""
        return self._view

    def facts(self) -> Mapping[str, Any]:
        """What a checkpoint keeps of the coordinator: data positions, the phase, the seed; JSON's types."""
        return {
            "data": self._data.memento(),
            "phase": self._state.phase,
            "seed": self._settings.seed,
            "consistency": str(self._view.consistency),
        }

    def set_consistency(self, consistency: Consistency) -> ClusterView:
        """See ClusterState.set_consistency."""
        return self._settle(self._state.set_consistency(consistency))

    def status(self) -> ClusterStatus:
        """See ClusterState.status."""
        return self._state.status(self._clock())

    async def barrier(self, rank: int, incarnation: int, phase: int, wait_seconds: float) -> BarrierState:
        """Arrive, and wait up to ``wait_seconds`` (30 s at most) for the barrier to open."""
        deadline = self._clock() + min(wait_seconds, BARRIER_WAIT_SECONDS)
        while True:
            self._check_open()
            state = self._settle(self._state.arrive(rank, incarnation, phase))
            left = deadline - self._clock()
            if state.released or left <= 0:
                return state
            await self._wait_for_change(left)

    async def lease_data(self, rank: int, incarnation: int, ask: LeaseAsk, wait_seconds: float) -> LeaseAnswer:
        """See DataLeases.lease; waits up to ``wait_seconds`` (30 s at most) while others hold all there is."""
        deadline = self._clock() + min(wait_seconds, BARRIER_WAIT_SECONDS)
        while True:
            self._check_open()
            decision = self._data.lease(rank, incarnation, ask)
            if not decision.reason and (ask.trained or decision.value.span is not None):
                # A lease is handed out without a word, and yet never twice.
                self._write_down()
            answer = self._settle(decision)
            left = deadline - self._clock()
            if answer.span is not None or answer.done or not ask.lease_items or left <= 0:
                return answer
            await self._wait_for_change(left)

    async def views(self, known_revision: int, journal_mark: bytes = b"") -> AsyncIterator[ClusterView]:
        """The present view unless it is ``known_revision``, then the newest one after every change.

        A slow reader skips views, it never queues them. ``journal_mark``: as in ``check_journal``. Raises Unavailable
        when the coordinator stops.
        """
        self.check_journal(journal_mark)
        while True:
            self._check_open()
            view = self._view
            # Also an older revision is news: it is of a coordinator that was started anew.
            if view.revision != known_revision:
                known_revision = view.revision
                yield view
            else:
                await self._changed.wait()

    def _as_saved(self, shard_map: ShardMap) -> ShardMap:
        """``shard_map`` as the checkpoint's: bit-equal on the same number of shards. Raises ModelMismatch."""
        assert self._saved is not None
        self._saved.check_matches(shard_map.spec)
        known = self._saved.model(shard_map.spec.name).shard_map
        placed = as_before(shard_map, known) or self._saved.aligned(shard_map)
        return replace(placed, restored_from=str(self._saved.folder))

    def _settle(self, decision: Decision[T]) -> T:
        if decision.reason:
            logger.log(logging.WARNING if decision.loss else logging.INFO, "%s", decision.reason)
            self._release_lost_leases()
            self._untold = True
        self._tell()
        return decision.value

    def _tell(self) -> None:
        """Show what was decided, once it is on disk. Raises Unavailable, and is to be called again, when it is not."""
        self.check_failed()
        if self._untold:
            self._write_down()
            self._untold = False
            self._view = self._marked_view()
            self._wake()

    def _marked_view(self) -> ClusterView:
        view = self._state.view
        return replace(view, journal_mark=self._journal.mark) if self._journal else view

    def _write_down(self) -> None:
        if self._journal is None:
            return
        now = replace(self._state.memento(), data=self._data.memento())
        if rows := changed_rows(self._kept, now):
            self._journal.write(rows)
            self._kept = now

    def _release_lost_leases(self) -> None:
        live = {rank: member.incarnation for rank, member in self._state.view.live(Role.WORKER).items()}
        if released := self._data.members(live).reason:
            logger.info("%s", released)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _check_open(self) -> None:
        self.check_failed()
        if self._closing:
            raise Unavailable("the coordinator is stopping")

    async def _wait_for_change(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    async def _end_leases(self) -> None:
        refused = False
        while True:
            now = self._clock()
            expiry = self._state.next_expiry()
            # Woken at least once per heartbeat, so that a pause of the whole process shows.
            wait = self._heartbeat_seconds if expiry is None else min(self._heartbeat_seconds, max(0.0, expiry - now))
            await asyncio.sleep(wait)
            overslept = self._clock() - now - wait
            if overslept > 0:
                self._state.extend_leases(overslept)
            if overslept > self._heartbeat_seconds / 2:
                logger.warning("stood still for %.1f s: all leases are extended by that", overslept)
            decision = self._state.expire(self._clock())
            try:
                self._settle(decision)
            except DamagedData:
                return
            except Unavailable as error:
                if not refused:
                    logger.warning("nothing new is told until the journal can be written: %s", error)
                refused = True
            else:
                refused = False
