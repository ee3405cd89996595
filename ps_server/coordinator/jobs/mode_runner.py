"""Changes the mode of the job at one point of all shards: each push is decided by one mode on all of them."""

from __future__ import annotations

import asyncio
import math
import time
import uuid

from ps_protocol import retry, times
from ps_protocol.cluster.view import ClusterView, Role
from ps_protocol.errors import NotReady, Retryable
from ps_protocol.logs import EventLogger
from ps_protocol.model.spec import Consistency
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.jobs.move_runner import BREATH_PAUSES
from ps_server.coordinator.jobs.quiesce import Busy, all_of, check_same_position, connected, quiesced
from ps_server.coordinator.settings import check_consistency

logger = EventLogger(__name__)


class ModeRunner:
    """Used on the coordinator's event loop. One change at a time."""

    def __init__(self, driver: Driver, busy: Busy) -> None:
        """``busy`` is locked while shards are paused."""
        self._driver = driver
        self._busy = busy
        #: Kept until they end.
        self._changes: set[asyncio.Task[ClusterView]] = set()

    async def change(self, consistency: Consistency, wait_seconds: float) -> ClusterView:
        """Change the mode; returns the view that has it.

        Tries again for ``wait_seconds`` while a checkpoint or a move holds the shards, or they do not come to one
        point. Then raises NotReady, and the mode is as before; InvalidRequest if it cannot work.
        """
        check_consistency(consistency, self._driver.settings.always_workers)
        attempts = retry.Attempts(retry.MOVE.within(wait_seconds))
        while True:
            paused_at = math.inf
            try:
                await self._acquire(attempts.left_seconds)
                paused_at = time.monotonic()
                # Whatever becomes of the caller, shards that are paused resume.
                made = asyncio.create_task(self._make(consistency), name="mode")
                self._changes.add(made)
                made.add_done_callback(self._ended)
                return await asyncio.shield(made)
            except Retryable as error:
                paused_seconds = max(0.0, time.monotonic() - paused_at)
                # Training goes on for longer than it was paused. Another attempt takes as long as this one.
                pause = max(attempts.pause_after(error) or math.inf, BREATH_PAUSES * paused_seconds)
                if pause + paused_seconds >= attempts.left_seconds:
                    # Not Unavailable, for which clients ask again: they would have no time for an answer.
                    raise NotReady(
                        f"the mode cannot change yet: {error.message}",
                        shard=error.shard,
                        remedy=error.remedy or "try again",
                    ) from error
                logger.info("mode.waits", "the mode is not changed yet: %s", error)
            await asyncio.sleep(pause)

    async def _acquire(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(max(0.1, seconds)):
                await self._busy.acquire()
        except TimeoutError:
            raise NotReady(
                "a checkpoint is made or slices are moved",
                remedy="try again when that has ended",
            ) from None

    def _ended(self, made: asyncio.Task[ClusterView]) -> None:
        self._busy.release()
        self._changes.discard(made)
        if not made.cancelled():
            made.exception()  # its caller has it, or has gone

    async def _make(self, consistency: Consistency) -> ClusterView:
        driver = self._driver
        view, maps = driver.view, driver.shard_maps
        if consistency == view.consistency or not maps or not view.live(Role.WORKER):
            # Nobody pushes: there is nothing to be brought to one point.
            return driver.set_consistency(consistency)
        numbers = {*view.used_shards, *(number for shard_map in maps.values() for number in shard_map.holders)}
        async with connected(driver, numbers) as shards, quiesced(shards, uuid.uuid4().hex) as quiesce:
            targets = quiesce.targets(quiesce.complete(maps))
            reached = await all_of(
                shard.catch_up(quiesce.name, targets[number], times.QUIESCE_SECONDS)
                for number, shard in quiesce.shards.items()
            )
            check_same_position(reached)
            changed = driver.set_consistency(consistency)
            quiesce.decided = True
            resumed = (
                shard.resume(quiesce.name, times.CALL_SECONDS, revision=changed.revision)
                for shard in quiesce.shards.values()
            )
            for error in await asyncio.gather(*resumed, return_exceptions=True):
                if isinstance(error, BaseException):
                    # It resumes by itself, and has the mode with its next view.
                    logger.warning("mode.waits", "a shard has not confirmed the new mode: %s", error)
            return changed
