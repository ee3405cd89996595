"""Reads what one shard needs of a checkpoint."""

from __future__ import annotations

from ps_protocol.layout import Layout
from ps_server.checkpoint import Checkpoint
from ps_server.checkpoint.restore import read_state, read_values
from ps_server.consistency import TrackerMemento
from ps_server.optimizers import Region, StateEntry


def read(checkpoint: Checkpoint, layout: Layout) -> tuple[Region, list[StateEntry]]:
    """Values and state of the slices of ``layout``. Raises ModelMismatch, DamagedData, ConfigError, InvalidRequest."""
    region = Region(layout)
    read_values(checkpoint, layout, region.bytes)
    return region, read_state(checkpoint, layout)


def saved_tracker(checkpoint: Checkpoint, model: str) -> TrackerMemento:
    """Where the job stood: what the furthest shard knew, and no worker. Raises ModelMismatch."""
    trackers = [TrackerMemento.from_json(facts["tracker"]) for facts in checkpoint.model(model).facts]
    return TrackerMemento(
        max(tracker.version for tracker in trackers),
        max(tracker.applied for tracker in trackers),
        max(tracker.highest for tracker in trackers),
    )
