"""Ends the leases of members that send no heartbeats, while the coordinator runs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress

from ps_protocol.cluster.view import Member
from ps_protocol.errors import DamagedData, Unavailable
from ps_protocol.logs import EventLogger
from ps_server.coordinator.changes import StateChange
from ps_server.coordinator.membership.state import MembershipState

logger = EventLogger(__name__)


class LeaseTimer:
    """A task on the driver's loop, which also retries failed writes of the journal.

    If it runs late (a busy machine, a stopped process, a laptop asleep), it extends all leases by the delay, in which
    no heartbeat could arrive.
    """

    def __init__(
        self,
        membership: MembershipState,
        heartbeat_seconds: float,
        clock: Callable[[], float],
        settle: Callable[[StateChange[tuple[Member, ...]]], None],
    ) -> None:
        """``settle`` publishes members whose leases have ended; it is also called without any."""
        self._membership = membership
        self._heartbeat_seconds = heartbeat_seconds
        self._clock = clock
        self._settle = settle
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin. Call once, from the loop."""
        self._task = asyncio.create_task(self._run(), name="coordinator-leases")

    async def close(self) -> None:
        """End the task, if it was started."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        heartbeat, refused, quiet_until = self._heartbeat_seconds, False, -math.inf
        woken = self._clock()
        while True:
            # What follows may take its time as well: the journal is written there.
            now = woken
            expiry = self._membership.next_expiry()
            # Wake at least once per heartbeat, to notice a pause of the whole process.
            wait = heartbeat if expiry is None else min(heartbeat, max(0.0, expiry - now))
            await asyncio.sleep(wait)
            woken = self._clock()
            overslept = woken - now - wait
            if overslept > 0:
                self._membership.extend_leases(overslept)
            if overslept > heartbeat / 2:
                logger.warning(
                    "server.stood_still", "stood still for %.1f s: all leases are extended by that", overslept
                )
            try:
                self._settle(self._membership.expire(woken))
            except DamagedData:
                return
            except Unavailable as error:
                if not refused:
                    logger.warning("journal.failed", "nothing new is sent until the journal can be written: %s", error)
                refused = True
            else:
                refused = False
            if self._membership.spares and now >= quiet_until:
                quiet_until = now + 60.0  # logged once a minute
                logger.warning(
                    "server.stood_still",
                    "most heartbeats are late here: leases last up to twice as long until they come",
                )
