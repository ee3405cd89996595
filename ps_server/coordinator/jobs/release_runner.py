"""Releases models between checkpoints and moves of slices, never during one."""

from __future__ import annotations

import asyncio
import time

from ps_protocol.cluster.view import ClosedModelAsk
from ps_protocol.errors import NotReady
from ps_server.coordinator import times
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.jobs.quiesce import Busy


class ReleaseRunner:
    """Used on the coordinator's event loop. One entry in the journal decides a release; shards follow the view."""

    def __init__(self, driver: Driver, busy: Busy) -> None:
        """``busy`` is locked while shards are paused, and for each decision here."""
        self._driver = driver
        self._busy = busy

    async def close(self, rank: int, incarnation: int, ask: ClosedModelAsk, wait_seconds: float) -> None:
        """End a worker's use of a model, and release the model if asked to.

        A release waits up to ``wait_seconds`` for the other workers that use it. Raises NotReady if some still do, or
        shards are paused for too long; Fenced.
        """
        until = time.monotonic() + wait_seconds
        await self._driver.close_model(rank, incarnation, ask, wait_seconds if ask.release else 0.0)
        if ask.release:
            await self._release(ask.model, ask.epoch, max(0.1, until - time.monotonic()))

    async def release(self, model: str) -> int:
        """Drop ``model``; returns the bytes of its variables.

        Raises NotReady while workers use it or shards are paused, ModelReleased, UnknownModel.
        """
        return await self._release(model, 0, times.BUSY_SECONDS)

    async def _release(self, model: str, epoch: int, wait_seconds: float) -> int:
        try:
            async with asyncio.timeout(min(wait_seconds, times.BUSY_SECONDS)):
                await self._busy.acquire()
        except TimeoutError:
            raise NotReady(
                f"model '{model}' cannot be released yet: a checkpoint is made or slices are moved",
                remedy="try again when that has ended",
            ) from None
        try:
            return self._driver.release_model(model, epoch)
        finally:
            self._busy.release()
