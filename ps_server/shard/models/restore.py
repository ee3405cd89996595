"""Brings a checkpoint back to one model on one shard: rows bucket by bucket, then values and state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import closing

from ps_protocol.errors import DamagedData
from ps_protocol.model.layout import Layout
from ps_server.checkpoint.format.validation import whole_number
from ps_server.checkpoint.read.checkpoint import Checkpoint
from ps_server.checkpoint.read.model_reader import read_state, read_values
from ps_server.checkpoint.read.table_reader import saved_table
from ps_server.consistency import TrackerState
from ps_server.log.entries import BucketsPut
from ps_server.optimizers.state import StateEntry
from ps_server.shard.execution.tasks import finished
from ps_server.shard.step.model import ShardModel
from ps_server.state.region import Region
from ps_server.tables.bucket_contents import BucketContents

BATCH_BYTES = 64 << 20
"""Buckets are logged together up to this size; one alone may be larger."""

_BUCKET_BYTES = 64
"""More than what announces a bucket takes."""

OnWrite = Callable[[int], None]

Batch = list[tuple[int, BucketContents]]


async def restore(
    checkpoint: Checkpoint,
    model: ShardModel,
    tracker: TrackerState | None = None,
    *,
    only_first: bool,
    on_write: OnWrite = lambda nbytes: None,
) -> None:
    """Replace what ``model`` has here. Raises ModelMismatch, DamagedData, ConfigError, InvalidRequest, StorageFull.

    ``on_write`` is told of how many bytes each write is, before it. Values come last: a model that a crash has left
    without them is restored again.
    """
    region, entries = await asyncio.to_thread(read, checkpoint, model.layout)
    with closing(batches(checkpoint, model.layout)) as pieces:
        # A running generator cannot be closed: its step is waited for.
        while batch := await finished(asyncio.to_thread(next, pieces, None)):
            nbytes = sum(contents.nbytes + _BUCKET_BYTES for _, contents in batch)
            on_write(nbytes)
            await model.rows.write(BucketsPut(model.name, batch), nbytes, at_cut=True)
    on_write(model.layout.region_bytes + sum(tensor.nbytes for _, tensor in entries))
    await model.values.load(region, entries, tracker, only_first=only_first, at_cut=True)


def read(checkpoint: Checkpoint, layout: Layout) -> tuple[Region, list[StateEntry]]:
    """Values and state of the slices of ``layout``. Raises ModelMismatch, DamagedData, ConfigError, InvalidRequest."""
    region = Region(layout)
    read_values(checkpoint, layout, region.bytes)
    return region, read_state(checkpoint, layout)


def batches(checkpoint: Checkpoint, layout: Layout) -> Generator[Batch]:
    """The buckets of ``layout`` by number of their table, also empty ones, in batches of about BATCH_BYTES.

    The model matches. Raises DamagedData, ConfigError.
    """
    batch: Batch = []
    spec = layout.shard_map.spec
    for number, (table, buckets) in enumerate(zip(spec.tables, layout.buckets, strict=True)):
        with saved_table(checkpoint, spec.name, table.name) as saved:
            for bucket in buckets:
                batch.append((number, saved.contents(bucket)))
                if sum(contents.nbytes for _, contents in batch) >= BATCH_BYTES:
                    yield batch
                    batch = []
    if batch:
        yield batch


def saved_tracker(checkpoint: Checkpoint, model: str) -> TrackerState:
    """Where the job stood: what the furthest shard knew, and no worker. Raises ModelMismatch, DamagedData."""
    try:
        trackers = [TrackerState.from_json(facts["tracker"]) for facts in checkpoint.model(model).facts]
        numbers = [(t.version, *t.applied, *t.highest) for t in trackers]
        if not trackers or not all(whole_number(number) for each in numbers for number in each):
            raise ValueError(f"versions and positions {numbers}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedData(
            f"{checkpoint.folder} does not say where model '{model}' stood",
            expected="what each shard knew of pushes",
            actual=repr(error)[:200],
            remedy="restore another checkpoint, or a copy of this one",
        ) from error
    return TrackerState(
        max(tracker.version for tracker in trackers),
        max(tracker.applied for tracker in trackers),
        max(tracker.highest for tracker in trackers),
    )
