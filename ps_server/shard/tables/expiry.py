"""Drops rows that have expired, or for which there is no room: beside the training, logged as any change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from ps_protocol.errors import PsError, StorageFull
from ps_protocol.logs import EventLogger
from ps_server.shard import times
from ps_server.shard.step.model import ShardModel

logger = EventLogger(__name__)


class RowExpiry:
    """One task of the shard's event loop. ``models()`` are those that are served.

    A row is never dropped while a push with its id waits for its round. The ids of dropped rows are logged, so that a
    replay needs no clock; they are dropped in small batches, between updates.
    """

    def __init__(self, models: Callable[[], Sequence[ShardModel]], clock: Callable[[], float] = time.time) -> None:
        self._models = models
        self._clock = clock

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(times.EXPIRY_SECONDS)
            for model in self._models():
                try:
                    await self.look(model)
                except StorageFull as error:
                    logger.warning("table.waits", "rows of model '%s' stay for now: %s", model.name, error)
                except PsError as error:
                    logger.debug("rows of model '%s' stay for now: %s", model.name, error)

    async def look(self, model: ShardModel) -> None:
        """Drop the expired rows of ``model``, batch by batch. Raises PsError."""
        for number in range(len(model.tables)):
            while await model.rows.expire(number, self._clock()):
                pass
