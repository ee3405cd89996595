"""Writes into a shard's log that a model was released."""

from __future__ import annotations

import asyncio

from ps_protocol.errors import PsError
from ps_protocol.logs import EventLogger
from ps_server.log.entries import Released
from ps_server.shard.context import ShardContext

logger = EventLogger(__name__)

_RELEASE_BYTES = 1 << 10
"""More than a ReleaseRecord takes."""


async def log_release(context: ShardContext, entry: Released) -> None:
    """Log that a model is dropped; tried again until the disk takes it."""
    while True:
        try:
            await context.write(entry, _RELEASE_BYTES, ("before_release_log", "after_release_log"))
            return
        except PsError as error:
            logger.warning("model.released", "the release of model '%s' cannot be logged yet: %s", entry.model, error)
            await asyncio.sleep(0.5)
