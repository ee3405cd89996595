"""Decides when a finished job no longer needs its processes, and ends the coordinator with its job if asked to."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from ps_protocol import times as shared
from ps_protocol.errors import Unavailable
from ps_protocol.logs import EventLogger
from ps_server.coordinator import times
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.jobs.checkpoints import Checkpoints

logger = EventLogger(__name__)


async def end_with_job(driver: Driver, checkpoints: Checkpoints, stop: asyncio.Event | None) -> None:
    """Release the members when the job is finished and its last checkpoint is written; runs until it is cancelled.

    ``stop`` is set as soon as they have left, or after a minute.
    """
    released_at: float | None = None
    while True:
        await asyncio.sleep(times.LOOK_SECONDS / 5)
        view = driver.view
        if not view.finished:
            released_at = None
        elif not view.released and checkpoints.settled:
            with suppress(Unavailable):  # until the journal can be written again
                driver.release()
        elif view.released and stop is not None:
            released_at = released_at or time.monotonic()
            if not view.members or time.monotonic() - released_at > shared.FAREWELL_SECONDS:
                logger.info("server.stopping", "the job is finished: stopping")
                stop.set()
                return
