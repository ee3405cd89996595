"""Makes a model usable on a shard: its first state, its checkpoint, its compiled code; and how far that has come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import closing

from ps_protocol import times
from ps_protocol.errors import DamagedData, NotReady
from ps_protocol.logs import EventLogger
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import ModelSpec, ShardMap
from ps_protocol.wire.convert.model import SHARD_MAP
from ps_server import tables
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.model_reader import read_state, read_values
from ps_server.checkpoint.table_reader import saved_table
from ps_server.checkpoint.validation import whole_number
from ps_server.consistency import TrackerState
from ps_server.log.entries import BucketsPut, Placed, Resharded
from ps_server.optimizers.state import StateEntry
from ps_server.shard.context import ShardContext
from ps_server.shard.reconcile import Reconciliation, check_fits, reconcile
from ps_server.shard.step.model import ShardModel
from ps_server.state.model_state import ModelState, new_model
from ps_server.state.region import Region
from ps_server.state.reshard import resharded
from ps_server.tables.bucket_contents import BucketContents
from ps_server.tasks import finished

logger = EventLogger(__name__)


class PlacingProgress:
    """One model being placed. Stages begin on the shard's event loop; the thread at work counts, any thread reads."""

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._model = model
        self._clock = clock
        self._doing = "asking for its shard map"
        self._done = 0
        #: How far an attempt has come that failed.
        self._best = 0
        self._read_bytes = 0
        self._unseen_seconds = 0.0
        self._began_at = 0.0

    def begin(self, doing: str, *, unseen_seconds: float = 0.0) -> None:
        """The next stage, in words; for ``unseen_seconds`` it counts as advancing, whether or not anything is seen."""
        self._done = self._counted() + 1
        self._doing, self._read_bytes = doing, self._read_bytes if doing == self._doing else 0
        self._unseen_seconds, self._began_at = unseen_seconds, self._clock()

    def fail(self, error: Exception) -> None:
        """It is tried again soon, from the start; that is progress once it gets further than before."""
        self._best, self._done = self.done, 0
        self._doing, self._unseen_seconds, self._read_bytes = f"cannot be placed yet: {error}", 0.0, 0

    def count(self, what: object = None) -> None:
        """One more unit of the stage is done."""
        self._done += 1

    def count_read(self, nbytes: int) -> None:
        """So many bytes more were read from a disk."""
        self._done += nbytes
        self._read_bytes += nbytes

    @property
    def done(self) -> int:
        """Rises as long as the work advances; it has no unit."""
        return max(self._best, self._counted())

    def _counted(self) -> int:
        unseen_seconds = min(self._clock() - self._began_at, self._unseen_seconds) if self._unseen_seconds else 0.0
        return self._done + int(1000 * unseen_seconds)

    def __str__(self) -> str:
        return f"model '{self._model}': {self._stage}"

    @property
    def _stage(self) -> str:
        return self._doing + (f", {self._read_bytes / 1e6:.0f} MB read" if self._read_bytes else "")

    def error(self, shard: int) -> NotReady:
        """For callers that ask for the model meanwhile."""
        return NotReady(
            f"model '{self._model}' is being placed on shard {shard}: {self._stage}",
            shard=str(shard),
            remedy="wait; where nothing advances, see the log of the shard",
            progress=self.done,
        )


async def new_state(context: ShardContext, shard_map: ShardMap, held: Iterable[ShardMap]) -> ModelState:
    """A model without values, logged as placed. ``held``: the shard maps of the other models here.

    Raises InvalidRequest for one that does not fit, UnsupportedOptimizer, StorageFull, InternalError.
    """
    check_fits(context.shard, shard_map, held, context.max_model_bytes)
    # First the model: one that cannot be made here must not be in the log, which could never be replayed.
    model = new_model(shard_map, context.shard, context.row_memory)
    await context.write(Placed(shard_map), SHARD_MAP.to_pb(shard_map).ByteSize())
    return model


async def recovered_state(
    context: ShardContext, start: ModelState, shard_map: ShardMap, held: Iterable[ShardMap]
) -> ModelState:
    """What was recovered, by the current shard map. Raises ModelMismatch, StorageFull, InternalError."""
    shard = context.shard
    pending = start.pending.shard_map if start.pending else None
    match reconcile(shard, start.shard_map, pending, shard_map):
        case Reconciliation.KEEP:
            start.pending = None
            return start
        case Reconciliation.RESET:
            return await new_state(context, shard_map, held)
        case Reconciliation.RESHARD:
            await context.write(Resharded(start.shard_map.spec.name, shard_map.epoch), 0)
            size = Layout.of(shard_map, shard).region_bytes
            return await context.executor.submit(lambda: resharded(start, shard), size)


async def restore_model(context: ShardContext, model: ShardModel, place: str, progress: PlacingProgress) -> None:
    """Load a new model from the checkpoint ``place``, before it is served. Raises PsError."""
    folder = await asyncio.to_thread(context.checkpoints.confine, place)
    doing = f"it is restored from {folder}"
    progress.begin(doing)
    checkpoint = await asyncio.to_thread(Checkpoint.open, folder, progress.count_read)

    def on_write(nbytes: int) -> None:
        progress.begin(doing, unseen_seconds=nbytes / times.SLOWEST_BYTES_PER_SECOND)

    tracker = saved_tracker(checkpoint, model.name)
    await restore(checkpoint, model, tracker, only_first=True, on_write=on_write)
    logger.info("checkpoint", "model '%s': restored from %s", model.name, folder)


async def warm_up(spec: ModelSpec, progress: PlacingProgress) -> None:
    """Compile what the model's tables need, before they are used."""
    if not spec.tables:
        return
    progress.begin("the code of its tables is compiled or loaded", unseen_seconds=times.LONG_PATIENCE_SECONDS)
    for table in spec.tables:
        await asyncio.to_thread(tables.warm_up, table, progress.count)


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

    ``on_write`` is called with the bytes of each write, before it. Values come last: a model that a crash has left
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
