"""Decides what of one model may be decided now: everything, or only pushes that belong to a cut, or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from copy import copy

from ps_protocol.errors import PsError
from ps_server.consistency import WorkerKey


class Gate:
    """Used on the shard's event loop. Open nearly always; a push that must wait keeps its memory."""

    def __init__(self) -> None:
        #: The last sequence of each worker that may pass; None: everything may.
        self._targets: Mapping[WorkerKey, int] | None = None
        #: The model stands where the cut is: nothing changes it, neither pushes nor steps that become complete.
        self.still = False
        self._closed: PsError | None = None
        self._changed = asyncio.Event()

    def admit(self, targets: Mapping[WorkerKey, int]) -> None:
        """Let pushes pass up to these sequences, and no others."""
        self._targets, self.still = targets, False
        self.stir()

    def hold(self) -> None:
        """Let nothing happen until ``open``."""
        self._targets, self.still = {}, True
        self.stir()

    def open(self) -> None:
        """Let everything pass."""
        self._targets, self.still = None, False
        self.stir()

    def close(self, error: PsError) -> None:
        """Whoever waits gets ``error``, and whoever comes, for good."""
        self._closed = error
        self.stir()

    def stops(self, worker: WorkerKey, sequence: int) -> bool:
        """Whether this push has to wait, or is refused."""
        if self._closed:
            return True
        return self._targets is not None and sequence > self._targets.get(worker, 0)

    async def passes(self, worker: WorkerKey, sequence: int) -> None:
        """Returns when this push may be decided. Raises what the gate was closed with."""
        while self.stops(worker, sequence):
            await self._wait()

    async def opened(self) -> None:
        """Returns when everything may pass. Raises what the gate was closed with."""
        while self._closed or self._targets is not None:
            await self._wait()

    def stir(self) -> None:
        """Something happened that a waiter of ``changed`` may wait for."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Returns after the next ``stir``."""
        await self._changed.wait()

    async def _wait(self) -> None:
        if self._closed:
            raise copy(self._closed)
        await self._changed.wait()
