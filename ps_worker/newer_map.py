"""Waits for the shard map that slices have moved to."""

from __future__ import annotations

import logging

from ps_protocol.errors import ModelMoved
from ps_protocol.model import ShardMap
from ps_worker.backoff import Backoff
from ps_worker.interfaces import TrainingSession

logger = logging.getLogger("ps_worker")


def check_newest(session: TrainingSession, known: ShardMap) -> None:
    """Raises ModelMoved when there is a newer map than ``known``: a shard waited for may be gone for good."""
    name = known.spec.name
    if session.epoch(name) > known.epoch:
        raise ModelMoved(f"slices of model '{name}' have moved")


def newer_map(session: TrainingSession, known: ShardMap, moved: ModelMoved, timeout_seconds: float) -> ShardMap:
    """The map in force, which is not ``known`` any more. Raises Unavailable when that is not told in time."""
    backoff = Backoff(timeout_seconds)
    while (newer := session.shard_map(known.spec.name)).epoch <= known.epoch:
        session.check()
        backoff.pause(moved)
    logger.info("model '%s': slices have moved to other shards", known.spec.name)
    return newer
