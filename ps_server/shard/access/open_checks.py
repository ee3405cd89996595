"""Decides whether a shard and a worker that opens a stream fit together: what both know of pushes, and their torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ps_protocol.errors import StateLost
from ps_protocol.logs import EventLogger
from ps_server.consistency import WorkerKey

logger = EventLogger(__name__)

_VERSION_CHARACTERS = 40


class OpenChecks:
    """One per shard, used on its event loop whenever a worker opens a stream."""

    def __init__(self, shard: int, promises: Callable[[], bool]) -> None:
        """``promises``: every push that a worker was told had been applied must be known here."""
        self._shard = shard
        self._promises = promises
        #: By rank, the version that was logged last.
        self._told: dict[int, str] = {}

    def acknowledged(self, model: str, worker: WorkerKey, acknowledged: int, known: int) -> None:
        """``worker`` was told that its push ``acknowledged`` had been applied; ``known``: the last one known here.

        Raises StateLost where durability promised that it is.
        """
        if acknowledged <= known:
            return
        error = StateLost(
            f"shard {self._shard} has lost pushes of worker {worker.rank} to model '{model}' that it had acknowledged",
            shard=str(self._shard),
            expected=f"push {acknowledged}, which the worker was told had been applied",
            actual=f"push {known} is the last that is known",
            remedy="its log was damaged or replaced by an older one: restore the data directory from a copy, or start "
            "again from a checkpoint",
        )
        if self._promises():
            logger.failure(error)
            raise error
        logger.warning(
            "recovery.lost",
            "shard %d: push %d of worker %d to model '%s' was acknowledged, and the last that is known is %d: what "
            "came between is lost, which this durability allows",
            self._shard,
            acknowledged,
            worker.rank,
            model,
            known,
        )

    def torch_version(self, worker: WorkerKey, version: str) -> None:
        """``worker`` has this version of torch, empty where it does not say. Speaks of a difference once."""
        version = version[:_VERSION_CHARACTERS]
        if not version or version == str(torch.__version__) or self._told.get(worker.rank) == version:
            return
        self._told[worker.rank] = version
        logger.warning(
            "versions",
            "shard %d applies updates with torch %s, and worker %d computes gradients with torch %s: their results may "
            "differ in the last digits; install the same version on both",
            self._shard,
            torch.__version__,
            worker.rank,
            ascii(version),
        )
