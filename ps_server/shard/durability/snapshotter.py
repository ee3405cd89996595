"""Decides when to write a snapshot of a shard's state, and writes it in pieces while training continues."""

from __future__ import annotations

import asyncio
import time
from asyncio import to_thread
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from ps_protocol.cluster.view import LogCounts
from ps_protocol.errors import ModelMoved, ModelReleased, PsError, Unavailable
from ps_protocol.logs import EventLogger
from ps_protocol.metrics.histogram import Histogram
from ps_protocol.model.layout import Layout
from ps_server.cli.options.storage import SnapshotRule
from ps_server.log.durable import DurableLog, Saved
from ps_server.log.folder import DataFolder
from ps_server.log.segments import FEWEST_SEGMENTS
from ps_server.log.snapshots import ModelPart, RowsPart, SnapshotWriter
from ps_server.optimizers.state import StateEntry
from ps_server.shard import times
from ps_server.shard.execution.executor import INLINE_WORK_BYTES, ShardExecutor
from ps_server.shard.reconcile import moved_on
from ps_server.state.blocks import Block, blocks_of, buckets_of, save_group
from ps_server.state.model_state import ModelState
from ps_server.tasks import first_of

if TYPE_CHECKING:
    from ps_server.tables.saves import TableSave
    from ps_server.tables.table import ShardTable

logger = EventLogger(__name__)


T = TypeVar("T")

MOST_PARTS = 128
"""Of earlier snapshots that one goes on from."""

_CHANGED_PART = 0.5
"""Of what all rows took: once changes take more, the next snapshot has all rows again."""

_SMALL_BYTES = 256 << 20
"""A log with less space is looked after more often."""


class SnapshotSource(Protocol):
    """One model, as it is copied: a ShardModel, or one that a standby follows."""

    @property
    def layout(self) -> Layout:
        """The layout of its bytes."""

    @property
    def loads(self) -> int:
        """The number of times values or state were replaced."""

    @property
    def is_pending(self) -> bool:
        """Whether later records cannot recover it alone: those of a staged reshard refer to earlier ones."""

    async def describe(self) -> ModelPart:
        """Where it stands. Raises ModelMoved when slices have moved since, as ``copy_block`` does."""

    async def copy_block(self, block: Block, into: memoryview) -> tuple[int, memoryview, list[StateEntry]]:
        """The last record in a copy of one block, its values, its optimizer state."""

    async def with_tables(self, work: Callable[[Sequence[ShardTable]], T]) -> tuple[int, T]:
        """The last record in what the tables are, and the result of ``work`` with them then: it reads them."""


class _SlicesMove(Unavailable):
    """A move has begun between the decision to take a snapshot and its first record."""


class Snapshotter:
    """Runs on the shard's event loop; the executor makes a copy of a block or a group of buckets between two updates.

    Copies are of different ages, so the log is written meanwhile in any case: with "snapshot" it is the only time.
    """

    def __init__(
        self,
        folder: DataFolder,
        log: DurableLog,
        executor: ShardExecutor,
        models: Callable[[], Sequence[SnapshotSource]],
        rule: SnapshotRule,
        *,
        log_goes_on: bool,
    ) -> None:
        self._folder = folder
        self._log = log
        self._executor = executor
        self._models = models
        self._rule = rule
        self._log_goes_on = log_goes_on
        self._buffer = memoryview(b"")
        #: The growth of the log during the last snapshot.
        self._grown_bytes = 0
        #: What the log had written at the last look, and when; how much it is expected to write until the next one.
        self._looked = log.written_bytes + log.lost_bytes, time.monotonic()
        self._until_next_bytes = 0
        #: Snapshots made, and how long each took.
        self.count = 0
        self.times = Histogram()
        #: Of all snapshots together.
        self.written_bytes = 0
        #: Snapshots that failed and were tried again.
        self.failures = 0
        self._stopping = asyncio.Event()
        self._abandoned = False
        self._one = asyncio.Lock()

    @property
    def counts(self) -> LogCounts:
        """The log and its snapshots in numbers. From any thread."""
        log = self._log
        age = time.monotonic() - log.saved.at if self.count else None
        return LogCounts(log.number, log.written_bytes, log.unsaved_bytes, age)

    async def run(self) -> None:
        """Take snapshots when they are due, until ``stop``. Failures are logged and retried."""
        small = self._rule.log_bytes < _SMALL_BYTES
        interval_seconds = times.SNAPSHOT_LOOK_SECONDS / (5 if small else 1)
        while not self._stopping.is_set():
            await first_of(self._stopping.wait(), seconds=interval_seconds)
            self._look(interval_seconds)
            outrun = self._outrun()
            if (outrun or self._due()) and not self._stopping.is_set():
                await self._try()
                if outrun:
                    self._log.grow(self._rule.log_bytes)

    def _look(self, interval_seconds: float) -> None:
        """Estimate what the log will have written by the next look, in ``interval_seconds``."""
        (before_bytes, before), now = self._looked, time.monotonic()
        self._looked = written_bytes, _ = self._log.written_bytes + self._log.lost_bytes, now
        rate = (written_bytes - before_bytes) / max(now - before, interval_seconds)
        self._until_next_bytes = int(rate * interval_seconds)

    def stop(self) -> None:
        """Make ``run`` end after the current snapshot. Do not cancel it: a thread may be writing."""
        self._stopping.set()

    def abandon(self) -> None:
        """Make ``run`` end soon; an unfinished snapshot leaves no files."""
        self._abandoned = True
        self.stop()

    async def _try(self) -> None:
        try:
            await self.take()
        except (ModelMoved, ModelReleased, _SlicesMove):
            logger.info(
                "snapshot",
                "shard %d: a snapshot begins again, for a model moves, has moved or was released",
                self._folder.identity.shard,
            )
        except (OSError, PsError) as error:
            self.failures += 1
            self._log.snapshot_failure = str(error)
            logger.error("snapshot.failed", "shard %d: no snapshot: %s", self._folder.identity.shard, error)
            await first_of(self._stopping.wait(), seconds=times.FULL_RETRY_SECONDS)

    async def take(self, logs: Callable[[], Awaitable[None]] | None = None) -> None:
        """Make one snapshot now, if there is anything that no snapshot has. Raises OSError, PsError.

        ``logs``: work whose records must be kept with it; the snapshot contains the records before them.
        """
        async with self._one:
            if logs is None and not await self._has_work():
                return
            began = time.monotonic()
            if not self._log_goes_on:
                await self._log.ready()
                await self._executor.submit(self._log.resume, 0)
            try:
                written = await self._write(logs)
            finally:
                if not self._log_goes_on:
                    await self._executor.submit(self._log.pause, 0)
            self.count += 1
        seconds = time.monotonic() - began
        self.times.observe(seconds)
        self.written_bytes += written
        shard = self._folder.identity.shard
        logger.info("snapshot", "shard %d: snapshot of %.1f MB in %.1f s", shard, written / 1e6, seconds)

    async def _has_work(self) -> bool:
        """Whether a snapshot may begin and would add anything."""
        if self._any_bound():
            return False
        if not self._log.unsaved_records and self._log.pressed:
            # The newest snapshot has everything: a log that waits for space waits for files not removed yet.
            await to_thread(self._log.cut, self._log.saved.number, self._rule.log_bytes)
        return self._log.unsaved_records > 0

    def _any_bound(self) -> bool:
        return any(model.is_pending for model in self._models())

    def _due(self) -> bool:
        rule, log = self._rule, self._log
        return log.pressed or (
            log.unsaved_records > 0
            and (
                time.monotonic() - log.saved.at >= rule.seconds
                or log.unsaved_room_bytes >= self._due_bytes
                or log.unsaved_records >= rule.log_records
            )
        )

    @property
    def _due_bytes(self) -> int:
        """The log size that triggers a snapshot: the rest is for records written until then and during it, and for
        segments not full.
        """
        bound = self._rule.log_bytes
        return max(bound // 4, bound - FEWEST_SEGMENTS * self._log.segment_bytes - self._meanwhile_bytes)

    @property
    def _meanwhile_bytes(self) -> int:
        """What the log is expected to grow by until the next look, and during a snapshot that begins then."""
        return self._grown_bytes * 5 // 4 + self._until_next_bytes

    def _outrun(self) -> bool:
        """Whether records come faster than files are made for them, or a push waits for one already: a snapshot frees
        files sooner than one is filled. The log grows afterwards.
        """
        log = self._log
        return (
            self._log_goes_on
            and log.unsaved_records > 0
            and (log.waiting > 0 or log.prepared_bytes < self._meanwhile_bytes)
            and log.may_grow(self._rule.log_bytes)
        )

    async def _write(self, logs: Callable[[], Awaitable[None]] | None) -> int:
        """Returns the bytes written. Values loaded during it invalidate it: then it begins again."""
        log = self._log
        begun_at, begun_bytes, begun_lost = time.monotonic(), log.written_bytes, log.lost_bytes
        while True:
            before = _named(self._models())
            # Read in the executor, before the models: these include what the records up to this one placed or moved.
            number = await self._executor.submit(lambda: log.number, 0)
            models = list(self._models())
            if not before <= _named(models):
                continue  # A model was released: records after ``number`` may be about it.
            if logs is None and self._any_bound():
                raise _SlicesMove("no snapshot begins while slices move")
            loads = [model.loads for model in models]
            writer = await to_thread(SnapshotWriter, self._folder.snapshots, number)
            try:
                saves = [await self._write_model(writer, model) for model in models]
                if loads != [model.loads for model in models]:
                    continue
                if logs:
                    await logs()
                through = await self._executor.submit(lambda: log.number, 0)
                await to_thread(log.flush, number)
                snapshot = await to_thread(writer.commit, through, log_goes_on=self._log_goes_on)
                for model_saves, part in zip(saves, snapshot.models, strict=True):
                    for save in model_saves:
                        save.end(part.rows)
                await to_thread(self._folder.holds_snapshot, snapshot.through)
                await to_thread(log.cut, snapshot.number, self._rule.log_bytes)
                log.saved, log.snapshot_failure = Saved(snapshot.number, begun_bytes, begun_at, begun_lost), ""
                self._grown_bytes = log.unsaved_room_bytes
                return writer.written_bytes
            finally:
                await to_thread(writer.close)

    async def _write_model(self, writer: SnapshotWriter, model: SnapshotSource) -> Sequence[TableSave]:
        """Returns the copies of its tables, to be ended when the snapshot is whole."""
        blocks = blocks_of(model.layout)
        part = await model.describe()
        _, (part.rows, saves) = await model.with_tables(lambda tables: begin_saves(tables, writer.has))
        writer.begin_model(part)
        largest = max((block.end - block.begin for block in blocks), default=0)
        if len(self._buffer) < largest:
            self._buffer = memoryview(bytearray(largest))
        for block in blocks:
            self._check()
            number, values, entries = await model.copy_block(block, self._buffer)
            await to_thread(writer.write_block, block, number, values, entries)
        wanted = buckets_of(model.layout)
        while True:
            self._check()
            number, group = await model.with_tables(lambda _: save_group(saves, wanted))
            if not group:
                return saves
            await to_thread(writer.write_saved, number, group)

    def _check(self) -> None:
        if self._abandoned:
            raise Unavailable("the snapshot was given up: the shard changes its role")


def most_snapshot_bytes(all_bytes: int) -> int:
    """What the rows of a table take in snapshots, at most, where all of them take ``all_bytes``: the part with all of
    them, changes, one more part that may change every row again, and all of them once more, while they are written.
    """
    return int((1 + _CHANGED_PART + 1 + 1) * all_bytes)


def begin_saves(
    tables: Sequence[ShardTable], is_there: Callable[[RowsPart], bool]
) -> tuple[tuple[RowsPart, ...], Sequence[TableSave]]:
    """The parts of earlier snapshots that the next one goes on from, and what copies the tables for it.

    All is copied again once changes take half of what everything took, or are in many parts, or one is not there.
    """
    places = {table.saved.place if table.saved is not None else () for table in tables}
    parts: tuple[RowsPart, ...] = places.pop() if len(places) == 1 else ()
    changed_bytes = sum(part.size_bytes for part in parts[1:])
    many = len(parts) > MOST_PARTS or changed_bytes > _CHANGED_PART * parts[0].size_bytes if parts else True
    if many or not all(map(is_there, parts)):
        return (), [table.save(None) for table in tables]
    return parts, [table.save(table.saved) for table in tables]


def _named(models: Sequence[SnapshotSource]) -> set[tuple[str, int]]:
    """Name and epoch of each model."""
    return {(model.layout.shard_map.spec.name, model.layout.shard_map.epoch) for model in models}


@dataclass(frozen=True, slots=True)
class PassiveReplica:
    """Used by the snapshotter, on the event loop; copies are made in the executor, between two chunks of records."""

    model: ModelState
    executor: ShardExecutor
    #: The last record applied; asked in the executor.
    number: Callable[[], int]

    @property
    def layout(self) -> Layout:
        """The layout of its bytes."""
        return self.model.replica.layout

    @property
    def loads(self) -> int:
        """Records that replaced values or state."""
        return self.model.loads

    @property
    def is_pending(self) -> bool:
        """Whether it waits for the record of the decision on its next shard map."""
        return self.model.pending is not None

    async def describe(self) -> ModelPart:
        """Where it stands. Raises ModelMoved, as ``copy_block``."""
        model = self.model

        def work() -> ModelPart:
            self._check()
            return ModelPart(model.shard_map, model.initialised, model.tracker.persisted_state(), self.number())

        return await self.executor.submit(work, 1 << 62)

    async def copy_block(self, block: Block, into: memoryview) -> tuple[int, memoryview, list[StateEntry]]:
        """The last record in a copy of one block, its values, its optimizer state."""
        replica = self.model.replica

        def work() -> tuple[int, memoryview, list[StateEntry]]:
            self._check()
            return self.number(), *replica.copy_block(block, into)

        return await self.executor.submit(work, block.end - block.begin)

    async def with_tables(self, work: Callable[[Sequence[ShardTable]], T]) -> tuple[int, T]:
        """The last record in what the tables are, and the result of ``work`` with them then: it reads them."""
        tables = self.model.replica.tables

        def read() -> tuple[int, T]:
            self._check()
            return self.number(), work(tables)

        return await self.executor.submit(read, INLINE_WORK_BYTES)

    def _check(self) -> None:
        if self.model.moved:
            held = self.model.shard_map
            raise moved_on(self.layout.shard, held.spec.name, held.epoch + 1, held.epoch)
