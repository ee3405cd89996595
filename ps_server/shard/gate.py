"""Decides which pushes of one model may be decided now: all of them, or those that belong to a cut."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from ps_server.consistency import WorkerKey


class Gate:
    """Used on the shard's event loop. Open nearly always; a push that must wait keeps its memory."""

    def __init__(self) -> None:
        #: The last sequence of each worker that may pass; None: everything may.
        self._targets: Mapping[WorkerKey, int] | None = None
        self._changed = asyncio.Event()

    def admit(self, targets: Mapping[WorkerKey, int]) -> None:
        """Let pushes pass up to these sequences, and no others."""
        self._targets = targets
        self.stir()

    def open(self) -> None:
        """Let everything pass."""
        self._targets = None
        self.stir()

    def stops(self, worker: WorkerKey, sequence: int) -> bool:
        """Whether this push has to wait."""
        return self._targets is not None and sequence > self._targets.get(worker, 0)

    async def passes(self, worker: WorkerKey, sequence: int) -> None:
        """Returns when this push may be decided."""
        while self.stops(worker, sequence):
            await self._changed.wait()

    def stir(self) -> None:
        """Something happened that a waiter of ``changed`` may wait for."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Returns after the next ``stir``."""
        await self._changed.wait()
