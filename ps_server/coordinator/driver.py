"""Owns the cluster's state while the coordinator runs: feeds it events and time, and wakes those who wait for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TypeVar

from ps_protocol.errors import Unavailable
from ps_protocol.model import Consistency, ModelSpec, ShardMap
from ps_protocol.view import BarrierState, ClusterStatus, ClusterView, Joined, MemberStats, Role
from ps_server.coordinator.settings import ClusterSettings
from ps_server.coordinator.state import Applicant, ClusterState, Decision

logger = logging.getLogger(__name__)

BARRIER_WAIT_SECONDS = 30.0
"""The longest that one barrier call is parked; the caller asks again."""

T = TypeVar("T")


class Driver:
    """The thin shell around ClusterState. Called by the service, on one event loop; nothing here blocks.

    A member's loss shows at the end of its lease. If the loop itself stood still (a stopped process, a laptop asleep),
    all leases are extended by that time: nobody could have been heard. Methods raise what ClusterState raises.
    """

    def __init__(self, settings: ClusterSettings, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` is a steady clock in seconds. Raises InvalidRequest for a mode that cannot work."""
        self._state = ClusterState(settings)
        self._clock = clock
        self._heartbeat_seconds = settings.heartbeat_seconds
        #: Set, and replaced by a new one, at every change of the state.
        self._changed = asyncio.Event()
        self._closing = False
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

    def heartbeat(self, role: Role, index: int, incarnation: int, stats: MemberStats) -> int:
        """Renew a lease; returns the revision of the view."""
        self._state.heartbeat(role, index, incarnation, stats, self._clock())
        return self._state.view.revision

    def leave(self, role: Role, index: int, incarnation: int, why: str) -> None:
        """See ClusterState.leave."""
        self._settle(self._state.leave(role, index, incarnation, why, self._clock()))

    def declare(self, rank: int, incarnation: int, spec: ModelSpec) -> ShardMap:
        """See ClusterState.declare."""
        return self._settle(self._state.declare(rank, incarnation, spec))

    def shard_map(self, model: str) -> ShardMap:
        """See ClusterState.shard_map."""
        return self._state.shard_map(model)

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

    async def views(self, known_revision: int) -> AsyncIterator[ClusterView]:
        """The present view unless it is ``known_revision``, then the newest one after every change.

        A slow reader skips views, it never queues them. Raises Unavailable when the coordinator stops.
        """
        while True:
            self._check_open()
            view = self._state.view
            # Also an older revision is news: it is of a coordinator that was started anew.
            if view.revision != known_revision:
                known_revision = view.revision
                yield view
            else:
                await self._changed.wait()

    def _settle(self, decision: Decision[T]) -> T:
        if decision.reason:
            logger.info("%s", decision.reason)
            self._wake()
        return decision.value

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _check_open(self) -> None:
        if self._closing:
            raise Unavailable("the coordinator is stopping")

    async def _wait_for_change(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    async def _end_leases(self) -> None:
        while True:
            now = self._clock()
            expiry = self._state.next_expiry()
            # Woken at least once per heartbeat, so that a pause of the whole process shows.
            wait = self._heartbeat_seconds if expiry is None else min(self._heartbeat_seconds, max(0.0, expiry - now))
            await asyncio.sleep(wait)
            overslept = self._clock() - now - wait
            if overslept > self._heartbeat_seconds / 2:
                logger.warning("stood still for %.1f s: all leases are extended by that", overslept)
                self._state.extend_leases(overslept)
            self._settle(self._state.expire(self._clock()))
